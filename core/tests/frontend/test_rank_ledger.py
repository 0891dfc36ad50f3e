"""The book of several engine cores, against a model, under any order of events."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.frontend.merged_stats import merge_stats
from engine.frontend.rank_ledger import RankLedger
from engine.interfaces.router import RankLoad
from engine.types.errors import ContractError, EngineDeadError
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest, FinishReason


def stats(**fields: int) -> StepStats:
    return StepStats(**(dict.fromkeys(StepStats.__struct_fields__, 0) | fields))


def requests(*names: str) -> list[EngineRequest]:
    return [EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams()) for name in names]


class Scripted:
    """A router that says what it is told to, and keeps what it saw."""

    def __init__(self, answer: object = None) -> None:
        self.answer, self.seen, self.died = answer, [], []  # type: ignore[var-annotated]
        self.resets = 0

    def route(self, requests: Sequence[EngineRequest], ranks: Sequence[RankLoad]) -> int:
        self.seen.append(list(ranks))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            return min(ranks, key=lambda rank: 4 * rank.num_waiting + rank.num_running).rank
        return self.answer  # type: ignore[return-value]

    def rank_died(self, rank: int) -> None:
        self.died.append(rank)

    def cache_reset(self) -> None:
        self.resets += 1


def ended(*names: str) -> list[CoreOutput]:
    return [CoreOutput(request_id=name, finish_reason=FinishReason.STOP) for name in names]


def test_what_was_sent_counts_before_the_rank_tells() -> None:
    ledger = RankLedger(2, Scripted())
    placed = [ledger.place(requests(str(i))) for i in range(7)]
    assert sorted(placed) == [0, 0, 0, 0, 1, 1, 1]
    assert ledger.load(0) == (0, 0, 4, 0.0)
    ledger.told(0, CoreOutputs(outputs=[], stats=stats(num_running=3, num_waiting=0, pages_used=5, pages_total=20)))
    assert ledger.load(0) == (0, 3, 1, 0.25), "one is on its way"
    ledger.told(0, CoreOutputs(outputs=ended("0", "2"), stats=None))
    assert ledger.load(0) == (0, 2, 0, 0.25)


def test_siblings_stay_together_and_aborts_go_where_they_are() -> None:
    ledger = RankLedger(2, Scripted())
    assert ledger.place(requests("a#0", "a#1", "a#2")) == 0
    assert ledger.place(requests("b")) == 1 == ledger.place(requests("c"))
    assert ledger.forget(["a#1", "b", "unknown", "a#1"]) == {0: ["a#1"], 1: ["b"]}
    assert ledger.num_sequences == 3


def test_a_death_loses_its_own_alone() -> None:
    router = Scripted()
    ledger = RankLedger(3, router)
    for i in range(6):
        ledger.place(requests(str(i)))
    ledger.told(
        1, CoreOutputs(outputs=[], stats=stats(num_running=2, generation_tokens=9, pages_used=3, pages_total=4))
    )
    assert ledger.bury(1) == ["1", "4"] and router.died == [1]
    assert ledger.living == (0, 2) and not ledger.lives(1) and ledger.num_sequences == 4
    assert {ledger.place(requests(f"n{i}")) for i in range(4)} == {0, 2}
    merged = ledger.merged()
    assert merged is not None and (merged.generation_tokens, merged.num_running, merged.pages_total) == (9, 0, 0)
    ledger.bury(0)
    count = len(router.seen)
    assert ledger.place(requests("last")) == 2 and len(router.seen) == count, "one rank is no choice"
    ledger.bury(2)
    with pytest.raises(EngineDeadError):
        ledger.place(requests("x"))


@pytest.mark.parametrize("answer", [7, -1, "0", True, ValueError("broken")])
def test_a_router_that_errs_ends_the_request_alone(answer: object) -> None:
    ledger = RankLedger(2, Scripted(answer))
    with pytest.raises(ContractError) as caught:
        ledger.place(requests("a"))
    assert caught.value.point == "router"
    assert ledger.num_sequences == 0


@settings(deadline=None)
@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_order_of_events(num_ranks: int, draw: random.Random) -> None:
    """Against a plain dict of who is where."""
    router = Scripted()
    ledger = RankLedger(num_ranks, router if num_ranks > 1 else None)
    model: dict[str, int] = {}
    living, count = set(range(num_ranks)), 0
    for _ in range(60):
        event = draw.choice(["place", "place", "place", "end", "abort", "die"])
        some = draw.sample(sorted(model), min(len(model), draw.randint(0, 3)))
        if event == "place" and living:
            names = [f"r{count}#{i}" for i in range(draw.randint(1, 3))]
            count += 1
            before = {rank: ledger.load(rank) for rank in living}
            rank = ledger.place(requests(*names))
            score = {rank: 4 * load.num_waiting + load.num_running for rank, load in before.items()}
            assert score[rank] == min(score.values())
            model |= dict.fromkeys(names, rank)
        elif event == "end":
            for rank in living:
                there = [name for name in some if model[name] == rank]
                running = draw.randint(0, 5)
                ledger.told(rank, CoreOutputs(outputs=ended(*there, "unknown"), stats=stats(num_running=running)))
            model = {name: rank for name, rank in model.items() if name not in some}
        elif event == "abort":
            assert ledger.forget(some) == {
                rank: [n for n in some if model[n] == rank] for rank in dict.fromkeys(model[n] for n in some)
            }
            model = {name: rank for name, rank in model.items() if name not in some}
        elif event == "die" and living and draw.random() < 0.3:
            rank = draw.choice(sorted(living))
            living.discard(rank)
            assert ledger.bury(rank) == [name for name, at in model.items() if at == rank]
            model = {name: at for name, at in model.items() if at != rank}
        assert ledger.num_sequences == len(model) and set(ledger.living) == living
        for rank in range(num_ranks):
            load = ledger.load(rank)
            assert load.num_running + load.num_waiting == sum(at == rank for at in model.values())
            assert load.num_running >= 0 and load.num_waiting >= 0


def test_merged_statistics_are_sums() -> None:
    counts = {name: i + 1 for i, name in enumerate(StepStats.__struct_fields__)}
    one = stats(**counts | {"hook_failures": (("otel", "step_done", 3),)})
    two = replace(one, step_id=50, num_running=100)
    merged = merge_stats([one, two])
    assert merged is not None and merged.step_id == 50 and merged.num_running == one.num_running + 100
    assert merged.hook_failures == (("otel", "step_done", 6),)
    for name in set(StepStats.__struct_fields__) - {"step_id", "num_running", "hook_failures"}:
        assert getattr(merged, name) == 2 * getattr(one, name)
    assert merge_stats([]) is None and merge_stats([one]) is one
