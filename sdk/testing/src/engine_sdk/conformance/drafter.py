"""The suite of point `drafter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.interfaces.drafter import Drafter, DrafterNeed, DraftRows, Drafts
from engine.types.params import SamplingParams
from engine.types.plan import NewSlot
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.ops.definition import Setting, distribution, rows_of
from engine_sdk.conformance.statistics import RARE, chi_square_tail
from engine_sdk.conformance.timing import median_seconds

VOCAB = 256
"""Of the model in the context that bodies are built with."""
SLOTS, LENGTH = 40, 120
NOBODYS = VOCAB + 9
"""Stands in the table where no token of a request stands."""


class Session:
    """The runner, as far as these tests play it."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens


@dataclass
class Life:
    """A request from `enter` to `leave`, to be lived again alone.

    Args:
        first: as it entered.
        steps: of each step that it took part in its number of tokens, the drafts that it wanted and got, and how many
            of these were kept.
        tokens: what it has by now.
    """

    first: NewSlot
    steps: list[tuple[int, int, list[int], int]]
    tokens: list[int]


class DrafterConformance(Conformance):
    """Drafts have the form that is asked for, follow from the request's tokens alone, and are drawn from the
    distribution that comes with them; so that what is accepted has the target's."""

    point = "drafter"
    protocol = "Drafter"
    entered = 0
    """Requests so far in a test."""

    @classmethod
    def needs(cls) -> Sequence[DrafterNeed]:
        base = DrafterNeed(dtype="float32", device=cls.device)
        return [base, replace(base, offers=frozenset({"hidden_states", "models"}))]

    @classmethod
    def impossible(cls) -> Sequence[DrafterNeed]:
        return [DrafterNeed(dtype="float32", device=cls.device, framework="abacus")]

    @classmethod
    def make(cls) -> Drafter:
        """A new body; skipped where the card needs what only a whole engine offers."""
        cls.require(DrafterNeed(dtype="float32", device=cls.device))
        return cls.body()(worker_context(cls.subject(), cls.device))  # type: ignore[no-any-return]

    # -- what is asked -----------------------------------------------------------------------------------------------
    @classmethod
    def table(cls, seed: int, letters: int = 5) -> torch.Tensor:
        """int32 [SLOTS, LENGTH] of few different tokens, so that texts repeat themselves."""
        drawn = np.random.default_rng(seed).integers(0, letters, (SLOTS, LENGTH)) * 7 % VOCAB
        return torch.from_numpy(drawn.astype(np.int32)).to(cls.device)

    @staticmethod
    def rows(seed: int, m: int) -> DraftRows:
        """Rows of any length, each slot once, that want 1 to 6 drafts."""
        random = np.random.default_rng([seed, m])
        lengths = np.where(random.random(m) < 0.2, random.integers(1, 4, m), random.integers(1, LENGTH - 8, m))
        columns = (random.permutation(SLOTS - 1)[:m], lengths, random.integers(1, 7, m))
        return DraftRows(*(column.astype(np.int32) for column in columns))

    def new_slot(self, slot: int, tokens: Sequence[int], salt: str | None) -> NewSlot:
        """A request that enters."""
        self.entered += 1
        return NewSlot(
            slot=slot, request_id=f"r{self.entered}", token_ids=np.array(tokens, np.int32),
            num_prompt_tokens=1 + len(tokens) // 2, params=SamplingParams(max_tokens=LENGTH, seed=1),
            stop_token_ids=np.empty(0, np.int32), cache_salt=salt,
        )  # fmt: skip

    def proposed(self, drafter: Drafter, rows: DraftRows, table: torch.Tensor) -> list[list[int]]:
        """The drafts that count, row by row, of requests that come for this one step and share no history."""
        self._enter(drafter, rows, table)
        found = self.drafted(drafter, rows, table)
        counts = np.array([len(drafts) // 2 for drafts in found], np.int32)
        drafter.accepted(rows, torch.from_numpy(counts).to(self.device))
        self._leave(drafter, rows, table)
        return found

    def _enter(self, drafter: Drafter, rows: DraftRows, table: torch.Tensor) -> None:
        for slot, length in zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True):
            drafter.enter(self.new_slot(slot, table[slot, :length].tolist(), f"salt {self.entered}"))

    def _leave(self, drafter: Drafter, rows: DraftRows, table: torch.Tensor) -> None:
        for slot, length in zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True):
            drafter.leave(slot, length, Session(table))

    def drafted(self, drafter: Drafter, rows: DraftRows, table: torch.Tensor) -> list[list[int]]:
        """The drafts that count, row by row; their form is checked, and that nothing is changed."""
        before, given = table.clone(), [column.copy() for column in rows]
        drafts = drafter.propose(rows, Session(table))
        assert torch.equal(table, before), "the table of tokens was changed"
        assert all(np.array_equal(a, b) for a, b in zip(rows, given, strict=True)), "the rows were changed"
        counts = self._counts(rows, drafts)
        tokens = drafts.tokens.cpu().numpy()
        found = [row[:count].tolist() for row, count in zip(tokens, counts.tolist(), strict=True)]
        assert all(0 <= token < VOCAB for row in found for token in row), "a draft is no id of the vocabulary"
        return found

    def _counts(self, rows: DraftRows, drafts: Drafts) -> np.ndarray:
        m, k = len(rows.slot), int(rows.num_drafts.max())
        assert drafts.tokens.dtype == torch.int32 and tuple(drafts.tokens.shape) == (m, k), (
            f"drafts are {drafts.tokens.dtype} {tuple(drafts.tokens.shape)}, not int32 {(m, k)}"
        )
        assert drafts.tokens.device.type == torch.device(self.device).type
        if drafts.counts is None:
            return rows.num_drafts
        assert isinstance(drafts.counts, np.ndarray) and drafts.counts.dtype == np.int32
        assert drafts.counts.shape == (m,)
        assert (drafts.counts >= 0).all() and (drafts.counts <= rows.num_drafts).all(), "more drafts than were wanted"
        return drafts.counts

    # -- properties --------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("m", [1, 2, 7, 39])
    def test_form(self, m: int) -> None:
        """Of any rows, one of a single token among them; nothing of the session is changed."""
        drafter = self.make()
        for seed in range(8):
            self.proposed(drafter, self.rows(seed, m), self.table(seed))

    def test_something_is_drafted(self) -> None:
        """Of texts that repeat themselves, some row gets some draft."""
        table = self.table(0, letters=2)
        assert any(self.proposed(self.make(), self.rows(0, 20), table))

    def test_all_ranks_propose_the_same(self) -> None:
        """Two bodies that hear the same give the same."""
        first, second = self.make(), self.make()
        for seed in range(6):
            rows, table = self.rows(seed, 12), self.table(seed)
            assert self.proposed(first, rows, table) == self.proposed(second, rows, table)

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        """Alone, or among rows that want other numbers of drafts."""
        for seed in range(4):
            rows, table = self.rows(seed, 9), self.table(seed)
            together = self.proposed(self.make(), rows, table)
            for i in range(9):
                alone = DraftRows(*(column[i : i + 1] for column in rows))
                assert self.proposed(self.make(), alone, table) == together[i : i + 1]

    def test_what_lies_past_the_tokens_is_not_read(self) -> None:
        """Other slots' tokens, and what stands behind a row's own: left over from whoever had the slot before."""
        for seed in range(6):
            rows, table = self.rows(seed, 9), self.table(seed)
            other = self.table(seed + 100)
            other[:, ::3] = NOBODYS
            for slot, length in zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True):
                other[slot, :length] = table[slot, :length]
            assert self.proposed(self.make(), rows, table) == self.proposed(self.make(), rows, other)

    def test_fewer_drafts_are_the_first_of_more(self) -> None:
        """How many are wanted changes how many there are, not which."""
        rows, table = self.rows(3, 20), self.table(3)
        many = self.proposed(self.make(), rows._replace(num_drafts=np.full(20, 6, np.int32)), table)
        few = self.proposed(self.make(), rows._replace(num_drafts=np.full(20, 2, np.int32)), table)
        assert all(a == b[: len(a)] for a, b in zip(few, many, strict=True))

    # -- slots -------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("letters", [2, 5])
    def test_requests_come_and_go(self, letters: int) -> None:
        """Requests that share no history, in slots that change hands, step by step with what was kept of the drafts:
        each gets the drafts that it gets alone, in another slot of a drafter that has never seen another."""
        for life in self._live(self.make(), letters, lambda number: f"salt {number}"):
            alone, slot = self.make(), (life.first.slot + 3) % SLOTS
            table = torch.full((SLOTS, LENGTH), NOBODYS, dtype=torch.int32, device=self.device)
            alone.enter(msgspec.structs.replace(life.first, slot=slot))
            for length, wanted, drafts, kept in life.steps:
                table[slot, :length] = torch.tensor(life.tokens[:length], dtype=torch.int32)
                rows = DraftRows(*(np.array([value], np.int32) for value in (slot, length, wanted)))
                again = self.drafted(alone, rows, table)
                assert again == [drafts], (
                    f"a request of {length} tokens in slot {life.first.slot} gets {drafts}, and alone {again[0]}: "
                    "something is left over from a request that may not share its history"
                )
                alone.accepted(rows, torch.tensor([kept], dtype=torch.int32, device=self.device))

    def test_histories_that_are_shared(self) -> None:
        """Requests of one salt, or without any, may learn from each other; all ranks do so alike."""
        for salt in (None, "one"):
            first, second = (self._live(self.make(), 12, lambda number: salt) for _ in range(2))  # noqa: B023
            assert [life.steps for life in first] == [life.steps for life in second]

    def _live(self, drafter: Drafter, letters: int, salt_of: Callable[[int], str | None]) -> list[Life]:
        """Some dozen requests in a few slots."""
        random, here, lives = np.random.default_rng(letters), dict[int, Life](), list[Life]()
        table = torch.full((SLOTS, LENGTH), NOBODYS, dtype=torch.int32, device=self.device)
        for _ in range(40):
            for slot in [slot for slot in here if random.random() < 0.2]:
                length = len(here.pop(slot).tokens)
                table[slot, length:] = NOBODYS
                drafter.leave(slot, length, Session(table))
            for slot in [slot for slot in range(1, 7) if slot not in here and random.random() < 0.3]:
                tokens = (random.integers(0, letters, int(random.integers(1, 20))) * 7).tolist()
                here[slot] = life = Life(self.new_slot(slot, tokens, salt_of(len(lives))), [], tokens)
                lives.append(life)
                drafter.enter(life.first)  # what the slot held before still stands behind its tokens
                table[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            slots = random.permutation([slot for slot in here if random.random() < 0.8]).astype(np.int32)
            if not len(slots):
                continue
            lengths = np.array([len(here[slot].tokens) for slot in slots.tolist()], np.int32)
            rows = DraftRows(slots, lengths, random.integers(1, 5, len(slots)).astype(np.int32))
            found, kept = self.drafted(drafter, rows, table), np.zeros(len(slots), np.int32)
            for i, (slot, length, wanted) in enumerate(zip(*(column.tolist() for column in rows), strict=True)):
                life, kept[i] = here[slot], random.integers(0, len(found[i]) + 1)
                life.steps.append((length, wanted, found[i], int(kept[i])))
                life.tokens += [*found[i][: kept[i]], int(random.integers(0, letters)) * 7]
                more = life.tokens[length:]
                table[slot, length : length + len(more)] = torch.tensor(more, dtype=torch.int32)
            drafter.accepted(rows, torch.from_numpy(kept).to(self.device))
        return lives

    # -- probabilities -----------------------------------------------------------------------------------------------
    def _drawn(self, n: int) -> tuple[np.ndarray, torch.Tensor]:
        """First drafts of many rows, and the distributions that they were drawn from; skipped for certain drafts.

        The rows are long, so that no two are alike: equal texts may well get equal draws.
        """
        drafter, tokens, probs = self.make(), [], []
        for seed in range(-(-n // (SLOTS - 1))):
            rows, table = self.rows(seed, SLOTS - 1), self.table(seed)
            rows = rows._replace(num_tokens=np.maximum(rows.num_tokens, 24).astype(np.int32))
            self._enter(drafter, rows, table)
            drafts = drafter.propose(rows, Session(table))
            if drafts.probs is None:
                not_served("its drafts are certain: it returns no probabilities")
            counts = self._counts(rows, drafts)
            m, k = drafts.tokens.shape
            assert drafts.probs.dtype in (torch.float32, torch.float64)
            assert tuple(drafts.probs.shape) == (m, k, VOCAB)
            there = torch.from_numpy(counts > 0).to(self.device)
            tokens.append(drafts.tokens[there, 0].cpu().numpy())
            probs.append(drafts.probs[there, 0].double())
            drafter.accepted(rows, torch.from_numpy(counts).to(self.device))
            self._leave(drafter, rows, table)
        return np.concatenate(tokens), torch.cat(probs)

    def test_probabilities_are_a_distribution(self) -> None:
        """Not negative, and they add up to 1; the draft itself is possible."""
        tokens, probs = self._drawn(400)
        q = probs.cpu().numpy()
        assert (q >= 0).all() and np.allclose(q.sum(axis=1), 1, atol=1e-4), "they do not add up to 1"
        assert (q[np.arange(len(tokens)), tokens] > 0).all(), "a draft has probability 0"

    def test_drafts_are_drawn_from_their_probabilities(self) -> None:
        """Thousands of first drafts: how often each token is drafted, chi-square."""
        tokens, probs = self._drawn(4000)
        tail = chi_square_tail(np.bincount(tokens, minlength=VOCAB), probs.sum(dim=0).cpu().numpy())
        assert tail > RARE, f"these counts have probability {tail:.1e}"

    def test_what_is_accepted_has_the_targets_distribution(self) -> None:
        """Put through the core's rejection sampling, with a target of its own: chi-square."""
        tokens, probs = self._drawn(4000)
        n, context = len(tokens), worker_context(self.subject(), self.device)
        logits = np.random.default_rng(5).normal(size=VOCAB) * 2
        rows = rows_of([Setting()] * n, list(range(n)), [3] * n, self.device)
        batch = torch.from_numpy(np.tile(logits, (n, 1))).to(self.device)
        assert context.ops is not None
        kept = context.ops.reject(batch, rows, torch.from_numpy(tokens.astype(np.int32)).to(self.device), probs)
        found = np.bincount(kept.cpu().numpy(), minlength=VOCAB)
        tail = chi_square_tail(found, n * distribution(logits, Setting()))
        assert tail > RARE, f"these counts have probability {tail:.1e}"

    @classmethod
    def figure(cls) -> str | None:
        """What a step's drafts cost."""
        if cls.subject().reasons(DrafterNeed(dtype="float32", device=cls.device)):
            return None
        drafter, table = cls.make(), torch.arange(64 * 1001, dtype=torch.int32).view(64, 1001) % 97
        session: Any = Session(table.to(cls.device))
        rows = DraftRows(np.arange(64, dtype=np.int32), np.full(64, 990, np.int32), np.full(64, 4, np.int32))
        cls()._enter(drafter, rows, session.tokens)
        seconds = median_seconds(lambda: drafter.propose(rows, session), cls.device)
        return f"4 drafts for each of 64 rows of 990 tokens: {seconds * 1e6:,.0f} us"
