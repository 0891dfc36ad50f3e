"""The rule by which requests get drafts: as it is written, and what it is worth where drafts are right so often."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.scheduling.slots import SlotTable
from engine.types.plan import NewSlot, StepPlan
from engine_kit.speculation import Speculation, StepTimes, best_lengths

PAGE = Path(__file__).parents[3] / "docs/operators/speculation.md"


def best(num_tokens: int, cost: float, max_rows: int, least: int = 1) -> np.ndarray:
    """int32 [max_rows + 1, 65]; k by the rows that decode, and by 64 p."""
    times = StepTimes(cost)
    return np.stack([best_lengths(times.of(max(rows, 1), num_tokens), least) for rows in range(max_rows + 1)])


def worth(p: float, k: int, cost: float, rows: int) -> float:
    """Tokens in the time of a step without drafts."""
    return sum(p**i for i in range(k + 1)) / (1 + k * rows * cost / (1 + (rows - 1) * cost))


@given(
    num_tokens=st.integers(1, 12),
    cost=st.floats(0, 1),
    rows=st.integers(1, 20),
    share=st.integers(0, 64),
)
@hypothesis_settings(max_examples=100, deadline=None)
def test_k_brings_most(num_tokens: int, cost: float, rows: int, share: int) -> None:
    k = best(num_tokens, cost, 20)[rows, share]
    values = [worth(share / 64, k, cost, rows) for k in range(num_tokens + 1)]
    assert values[k] == pytest.approx(max(values))


def test_k_grows_with_the_share_that_is_right_and_falls_with_cost_and_rows() -> None:
    for cheap, dear in pairwise(best(8, cost, 64) for cost in (0.0, 0.02, 0.1, 0.5, 1.0)):
        assert (np.diff(cheap, axis=1) >= 0).all() and (np.diff(cheap[1:], axis=0) <= 0).all()
        assert (dear <= cheap).all()
    assert not best(8, 1.0, 4).any(axis=0)[:-1].any(), "a draft that costs a step must be certain"


def test_what_is_drafted_whole_is_weighed_whole() -> None:
    """A tree of 16 drafts costs 0.8 of a step: right three times of ten it brings 0.4 tokens, where a chain of two
    would have been worth it."""
    whole, chain = best(16, 0.05, 1, least=16)[1], best(16, 0.05, 1)[1]
    assert set(whole.tolist()) == {0, 16}
    assert whole[int(64 * 0.3)] == 0 and chain[int(64 * 0.3)] == 2
    assert whole[int(64 * 0.6)] == 16


def test_paths_that_are_drawn_to_their_ends_count_no_wrong_draft() -> None:
    """Of a tree of 16 drafts, 4 of which follow one another, that costs 1.6 steps: 5 tokens in 2.6 are worth it, and 3
    would not be, as often as they came."""
    times = StepTimes(0.1).of(1, 16)
    assert best_lengths(times, 16, depth=4)[[64, 38]].tolist() == [16, 0] and best_lengths(times, 16)[38] == 0
    rule, slot = Speculation(1, 16, cost=0.1, least=16, depth=4), np.zeros(1, np.int64)
    rule.enter(0)
    for known in range(5, 300, 5):
        rule.learn(slot, np.array([known]), np.array([16]), np.array([4]))
        slots = SimpleNamespace(placed=np.array([known]), limit=np.array([known + 50]), order=slot)
        assert rule.drafts(slot, cast(SlotTable, slots), 64)[0] == 16
    assert rule._right[0] > 30 * rule._wrong[0]


class Played:
    """One request whose drafts are right or wrong as they are told, beside `rows` - 1 others."""

    def __init__(self, num_tokens: int, cost: float, rows: int = 1) -> None:
        self.rule = Speculation(rows, num_tokens, cost=cost)
        self.cost = rows * cost / (1 + (rows - 1) * cost)
        self.ready = np.arange(rows)
        for slot in range(rows):
            self.rule.enter(slot)
        self.slots = SimpleNamespace(
            placed=np.zeros(rows, np.int32), limit=np.full(rows, 10**9, np.int32), order=np.arange(rows)
        )
        self.at = 0
        self.seconds = 0.0

    def step(self, right: np.ndarray) -> int:
        """A step; the drafts that it had. right: of each token to come, whether a draft of it is right."""
        self.slots.placed[:] = self.at
        k = int(self.rule.drafts(self.ready, cast(SlotTable, self.slots), 10**9)[0])
        wrong = np.flatnonzero(~right[self.at : self.at + k])
        accepted = int(wrong[0]) if wrong.size else k
        self.at += 1 + accepted
        self.seconds += 1 + k * self.cost
        if k:
            n = len(self.ready)
            self.rule.learn(*(np.full(n, v) if i else self.ready for i, v in enumerate((0, self.at, k, accepted))))
        return k

    def run(self, right: np.ndarray, tokens: int) -> float:
        """Tokens in the time of a step without drafts."""
        while self.at < tokens:
            self.step(right)
        return self.at / self.seconds


def texts(p: float, n: int) -> np.ndarray:
    return np.random.default_rng(3).random(n) < p


@pytest.mark.parametrize("cost", [0.0, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_it_is_worth_nearly_what_the_best_number_is(p: float, cost: float) -> None:
    """The request does not know how often its drafts will be right; who knew would take the best k from the start."""
    found = Played(4, cost).run(texts(p, 3010), 3000)
    best = max(worth(p, k, cost, 1) for k in range(5))
    assert found > 0.98, "never noticeably slower than without drafts"
    assert found > 0.93 * best


def test_it_goes_off_where_drafts_cost_more_than_they_bring_and_on_again() -> None:
    right = np.concatenate([np.zeros(500, bool), np.ones(500, bool), np.zeros(500, bool), np.ones(10, bool)])
    played, by_token = Played(4, 0.05), {}
    while played.at < 1400:
        at = played.at
        by_token[at] = played.step(right)
    assert sum(k for at, k in by_token.items() if 100 <= at < 500) <= 7, "probes alone, at last one in 64 tokens"
    first = next(at for at, k in by_token.items() if at >= 500 and k == 4)
    assert first <= 500 + 64 + 5, "one probe that is accepted, and drafts are there again"
    assert all(k == 4 for at, k in by_token.items() if first <= at < 990)
    assert sum(k for at, k in by_token.items() if at >= 1100) <= 7


def test_many_rows_make_drafts_dear() -> None:
    """Half of the drafts are right: worth it for one request, and not for 64, whose step goes by tokens."""
    right = texts(0.5, 700)
    alone, crowded = Played(4, 0.05), Played(4, 0.05, rows=64)
    assert alone.run(right, 600) > 1.4
    assert 0.97 < crowded.run(right, 600) < 1.02
    assert crowded.rule.num_drafts < 64 * 40


class Timed:
    """Requests beside a clock: a step takes as long as `seconds` says of its rows and their drafts."""

    def __init__(self, seconds: Callable[[int, int], float], rows: int = 1, num_tokens: int = 4) -> None:
        self.rule = Speculation(rows, num_tokens, cost=None)
        self.seconds = seconds
        self.ready = np.arange(rows)
        for slot in range(rows):
            self.rule.enter(slot)
        self.slots = SimpleNamespace(
            placed=np.zeros(rows, np.int32), limit=np.full(rows, 10**9, np.int32), order=np.arange(rows)
        )
        self.now = 7.0
        self.rule.took(self.plan(3, None), None, self.now)  # of a prompt
        self.drafted: list[int] = []

    def plan(self, num_tokens: int, drafts: np.ndarray | None) -> StepPlan:
        n = len(self.ready)
        return StepPlan(
            step_id=1, slot_of_row=self.ready, num_computed=self.ready,
            num_tokens=np.full(n, num_tokens) if drafts is None else 1 + drafts, samples=np.ones(n, bool),
            num_decodes=n if drafts is None and num_tokens == 1 else 0, new_slots=[], new_blocks=[], num_drafts=drafts,
        )  # fmt: skip

    def step(self, right: float, random: np.random.Generator) -> None:
        k = self.rule.drafts(self.ready, cast(SlotTable, self.slots), 10**9)
        had = k if k.any() else None
        self.now += self.seconds(len(k), int(k.max()))
        self.rule.took(self.plan(1, had), had, self.now)
        accepted = np.array([int((random.random(many) < right).cumprod().sum()) for many in k.tolist()])
        self.slots.placed += 1 + accepted
        if had is not None:
            tried = k > 0
            self.rule.learn(self.ready[tried], self.slots.placed[tried], k[tried], accepted[tried])
        self.drafted.append(int(k.max()))

    def run(self, steps: int, right: float = 0.8, seed: int = 0) -> list[int]:
        random = np.random.default_rng(seed)
        for _ in range(steps):
            self.step(right, random)
        return self.drafted[-steps:]


def test_what_drafts_cost_is_measured() -> None:
    """At 80 % right, drafts that cost little stay, and those that cost what they bring go, in requests of any speed."""
    cheap = Timed(lambda rows, k: 1e-4 * (1 + 0.03 * k))
    assert np.mean(cheap.run(400)[100:]) > 3.5
    dear = Timed(lambda rows, k: 1e-3 * (1 + 0.9 * k))
    assert np.mean(dear.run(400)[100:]) < 0.2
    slow = Timed(lambda rows, k: 1 + 3 * (k > 0))  # whatever is asked of it
    assert np.mean(slow.run(400)[100:]) < 0.5


def test_what_a_step_takes_is_found_again() -> None:
    """Of rows and drafts that differ, through noise; and when it changes."""
    random, times = np.random.default_rng(1), StepTimes(0.05)
    for a, b, c, d in ((3e-3, 2e-4, 4e-4, 1e-3), (1e-2, 1e-5, 0.0, 2e-3)):
        for number in range(800):
            rows, k = int(random.integers(1, 9)), int(random.integers(0, 6))
            seconds = a + b * rows * (1 + k) + (k > 0) * (c + d * k)
            times.add(rows, rows * k, k or None, seconds * random.uniform(0.9, 1.1) * (20 if number % 97 == 5 else 1))
        times.fit()
        for rows in (1, 4, 8):
            expected = a + b * rows * (1 + np.arange(6)) + (np.arange(6) > 0) * (c + d * np.arange(6))
            assert times.of(rows, 5) == pytest.approx(expected, rel=0.25)


def test_steps_without_drafts_are_there_to_be_timed() -> None:
    """The first two, and two of each 100: they cost next to nothing. With a cost that is given there are none."""
    played = Timed(lambda rows, k: 1 + 0.02 * k)
    drafted = played.run(400, right=1.0)
    assert [at % 100 for at, k in enumerate(drafted) if k == 0] == [0, 1] * 4
    told = Speculation(1, 4)
    told.enter(0)
    assert told.drafts(played.ready, cast(SlotTable, played.slots), 99) == 4


def test_a_clock_that_stands_still_measures_nothing() -> None:
    """Then a draft costs 0.05, as it does until something is known."""
    assert np.mean(Timed(lambda rows, k: 0.0).run(300, right=1.0)) > 3.8


def test_prompts_are_not_timed() -> None:
    """A step with a prompt's tokens, or a new request, takes longer for another reason."""
    played = Timed(lambda rows, k: 1.0)
    for number in range(9):
        plan = played.plan(1 + number % 2, None)
        plan.new_slots = [] if number % 2 else cast(list[NewSlot], [None])
        played.rule.took(plan, None, 100.0 * number)
    assert np.mean(played.run(300, right=1.0)) > 3.8


@given(rounds=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40), adaptive=st.booleans())
@hypothesis_settings(max_examples=100, deadline=None)
def test_counts(rounds: list[tuple[int, int]], adaptive: bool) -> None:
    """By place they add up, and no place has more than the one before it; k stays within its bounds."""
    rule = Speculation(1, 6, adaptive)
    rule.enter(0)
    slot, known = np.zeros(1, np.int64), 0
    for drafted, accepted in rounds:
        accepted = min(accepted, drafted)
        known += 1 + accepted
        rule.learn(slot, *(np.array([value]) for value in (known, drafted, accepted)))
        slots = SimpleNamespace(placed=np.array([known]), limit=np.array([known + 5]), order=slot)
        assert 0 <= rule.drafts(slot, cast(SlotTable, slots), 9)[0] <= 4
        if not adaptive:
            assert rule.drafts(slot, cast(SlotTable, slots), 2)[0] == 2
    assert rule.num_rows == len(rounds)
    assert rule.accepted_at.sum() == rule.num_accepted <= rule.num_drafts
    assert (np.diff(rule.accepted_at) <= 0).all() and rule.accepted_at[0] <= rule.num_rows


def table(heading: str) -> list[list[str]]:
    """The rows of the page's table below a heading's line."""
    lines = PAGE.read_text().partition(heading)[2].splitlines()
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines if line.startswith("|")]
    return rows[: next((i for i, row in enumerate(rows[2:], 2) if len(row) != len(rows[0])), None)]


def test_the_tables_of_the_page_are_the_rule() -> None:
    head, _, *rows = table("<!-- the rule -->")
    crowds = [int(cell) for cell in head[1:]]
    lengths = best(8, 0.05, max(crowds))
    for share, *cells in rows:
        expected = lengths[crowds, round(64 * float(share.rstrip(" %")) / 100)]
        assert cells == [str(k) if k else "none" for k in expected], share
    head, _, *rows = table("<!-- what it is worth -->")
    for share, *cells in rows:
        p = float(share.rstrip(" %")) / 100
        for cost, cell in zip(head[1:], cells, strict=True):
            found = Played(4, float(cost)).run(texts(p, 3010), 3000)
            assert abs(found - float(cell)) < 0.02, f"{p} at {cost}: {found:.2f}"
