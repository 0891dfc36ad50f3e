"""The suite of point `drafter`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import (
    OFFERS,
    DraftBatch,
    Drafter,
    DrafterCard,
    DrafterNeed,
    DrafterOptions,
    DraftRows,
    Drafts,
    seen_from,
)
from engine.interfaces.step import TargetStep
from engine.types.params import SamplingParams
from engine.types.plan import NewSlot, StepPlan
from engine.types.start import DraftStart
from engine_kit.philox import uniform
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.ops.definition import Setting, distribution, rows_of
from engine_sdk.conformance.statistics import RARE, chi_square_tail, log_probability_tail
from engine_sdk.conformance.timing import median_seconds

VOCAB = 256
"""Of the model in the context that bodies are built with."""
SLOTS, LENGTH = 40, 120
NOBODYS = VOCAB + 9
"""Stands in the table where no token of a request stands."""


class PlayedModel:
    """A draft model, as these tests play it: what it keeps of a token is a vector of this token, its features and its
    position, and its hidden state there is made of all that is kept up to there and that it sees.

    Attributes:
        kept: [SLOTS + 1, LENGTH, hidden_size]; NaN where nothing is kept.
    """

    def __init__(self, hidden_size: int, seed: int, device: str) -> None:
        random = torch.Generator().manual_seed(seed)
        self.kept = torch.full((SLOTS + 1, LENGTH, hidden_size), torch.nan, dtype=torch.float64, device=device)
        self._embed = torch.randn(VOCAB, hidden_size, dtype=torch.float64, generator=random).to(device)
        self._bias = torch.randn(VOCAB, dtype=torch.float64, generator=random).to(device) * 2
        self._head = torch.randn(hidden_size, VOCAB, dtype=torch.float64, generator=random).to(device)
        self._where = torch.randn(LENGTH, hidden_size, dtype=torch.float64, generator=random).to(device)

    def compute(
        self, slot: int, first: int, tokens: torch.Tensor, features: torch.Tensor | None, hidden: int = 0
    ) -> torch.Tensor:
        """Keep tokens [n] from a place on, and give their hidden states [n, hidden_size].

        hidden: bits of one token that is a node of a tree, see `DraftBatch`.
        """
        made, end = self._embed[tokens.long()], first + len(tokens)
        if features is not None:
            weights = torch.cos(torch.arange(features.shape[1], device=made.device) + 1.0).double()
            made = made + torch.outer(features.double() @ weights, self._where[0])
        beyond = hidden.bit_count()
        self.kept[slot, first:end] = made * self._where[first - beyond : end - beyond]
        seen: Any = slice(end)
        if hidden:
            seen = [place for place in range(end) if place >= first or not hidden >> (first - place) & 1]
        return torch.tanh(self.kept[slot, seen].cumsum(dim=0)[-len(tokens) :] * 0.3)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, VOCAB]."""
        return hidden.double() @ self._head * 0.3 + self._bias


class ScriptedSession:
    """The runner, as these tests play it, and the models that the card names. Implements `DraftSession`."""

    def __init__(self, models: Sequence[PlayedModel], rejects: bool, captures: bool = False) -> None:
        self.tokens = torch.empty(0)
        self.asked = False  # for drafts of captured passes
        self._models = models
        self._rejects = rejects
        self._captures = captures
        self._limits: dict[int, int] = {}

    def at(self, table: torch.Tensor, rows: DraftRows | None = None) -> ScriptedSession:
        """With this table of tokens, and the rows that want drafts."""
        self.tokens = table
        if rows is not None:
            ends = (rows.num_tokens + rows.num_drafts).tolist()
            self._limits |= zip(rows.slot.tolist(), ends, strict=True)
        return self

    def forget(self, slot: int) -> None:
        """Another request has the slot."""
        self._limits.pop(slot, None)
        for model in self._models:
            model.kept[slot] = torch.nan

    def model(self, index: int = 0) -> Any:
        return self._models[index]

    def run(self, index: int, batch: DraftBatch) -> torch.Tensor:
        """See `DraftSession.run`: rows that want no more drafts are computed in the slot behind all others."""
        each, hidden = batch.num_tokens, []
        slots, starts, bits = batch.slot.tolist(), batch.start.tolist(), [0] * len(batch.slot)
        assert batch.token_ids.dtype == torch.int32 and len(batch.token_ids) == len(slots) * each, "other tokens"
        if batch.hidden is not None:
            assert each == 1 and batch.hidden.dtype == np.int64, "nodes of trees are rows of one token"
            bits = batch.hidden.view(np.uint64).tolist()
            assert all(bit & 1 == 0 for bit in bits), "a node does not see itself"
        once = slots if batch.hidden is None else list(zip(slots, starts, strict=True))
        assert len(set(once)) == len(once), "a slot stands in two rows, or a place of it"
        assert set(slots) <= self._limits.keys(), "a draft model runs for a request that has wanted no drafts"
        for i, (slot, start, hides) in enumerate(zip(slots, starts, bits, strict=True)):
            assert start >= 0, "a position before the first"
            own, place = slice(i * each, (i + 1) * each), (slot, start)
            if start + each > self._limits[slot]:
                place, hides = (SLOTS, 0), 0
            features = None if batch.features is None else batch.features[own]
            hidden.append(self._models[index].compute(*place, batch.token_ids[own], features, hides))
        return torch.cat(hidden)

    def run_step(self, index: int, step: TargetStep, features: torch.Tensor | None = None) -> torch.Tensor:
        """See `DraftSession.run_step`; the states of what pads the step are NaN."""
        plan, hidden, start = step.plan, [], 0
        rows = zip(*(x.tolist() for x in (plan.slot_of_row, plan.num_computed, plan.num_tokens)), strict=True)
        for slot, first, count in rows:
            own = slice(start, start + count)
            start += count
            tokens = self.tokens[slot, first : first + count].clamp(max=VOCAB - 1)
            if features is not None:
                tokens = step.next_tokens[own]
            of_row = None if features is None else features[own]
            hidden.append(self._models[index].compute(slot, first, tokens, of_row))
        return F.pad(torch.cat(hidden), (0, 0, 0, len(step.next_tokens) - start), value=torch.nan)

    def draft(self, index: int, rows: DraftRows) -> torch.Tensor | None:
        """See `DraftSession.draft`; None but where these tests play a session that captures."""
        self.asked = True
        if not self._captures or self._rejects:
            return None
        slot, start = (torch.from_numpy(column).long() for column in (rows.slot, rows.num_tokens - 1))
        token, drafts = self.tokens[slot, start], []
        for ahead in range(int(rows.num_drafts.max())):
            hidden = self.run(index, DraftBatch(rows.slot, rows.num_tokens - 1 + ahead, 1, token))
            token, _ = self.draw(self._models[index].logits(hidden), rows, ahead)
            drafts.append(token)
        return torch.stack(drafts, 1)

    def draw(self, logits: torch.Tensor, rows: DraftRows, ahead: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From softmax(logits), by a number that follows from the request's tokens."""
        wants = torch.from_numpy(rows.num_drafts > ahead).to(logits.device)
        assert tuple(logits.shape) == (len(rows.slot), VOCAB), f"logits of shape {tuple(logits.shape)} for these rows"
        assert logits[wants].isfinite().all(), "a draft is made of keys and values that nobody has computed"
        q = torch.softmax(logits.nan_to_num(0.0).double(), dim=1)
        seeds = [
            hash(tuple(self.tokens[s, :n].tolist())) for s, n in zip(*map(np.ndarray.tolist, rows[:2]), strict=True)
        ]
        u = uniform(np.array(seeds, np.int64).view(np.uint64), rows.num_tokens + ahead, 9)
        chosen = (q.cumsum(dim=1) <= torch.from_numpy(u).to(q.device).unsqueeze(1) * q.sum(dim=1, keepdim=True)).sum(
            dim=1
        )
        return chosen.clamp(max=VOCAB - 1).int(), q if self._rejects else None


class Observed(NamedTuple):
    """A step of the target, as these tests play it: see `engine.interfaces.step.TargetStep`."""

    plan: StepPlan
    query_start_loc: torch.Tensor
    hidden: torch.Tensor
    streams: dict[int, torch.Tensor]
    next_tokens: torch.Tensor
    kept: torch.Tensor

    @property
    def last(self) -> torch.Tensor:
        """The place of each row's last token that counts."""
        return self.query_start_loc[: len(self.kept)].long() + self.kept - 1


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
    rejects = False
    """Drafts come with the distribution that they are drawn from."""
    captures = False
    """The session's passes are captured with their draws."""
    num_models = 1
    """Draft models, of a card that names some; override it."""
    played: ClassVar[type[PlayedModel]] = PlayedModel
    """What plays them. A driver that calls more of its models than `logits` overrides it."""

    @classmethod
    def needs(cls) -> Sequence[DrafterNeed]:
        base = DrafterNeed(dtype="float32", device=cls.device)
        return [base, replace(base, offers=frozenset({"hidden", "streams", "models"}))]

    @classmethod
    def impossible(cls) -> Sequence[DrafterNeed]:
        any_framework = cls._card().framework is None
        return [] if any_framework else [DrafterNeed(dtype="float32", device=cls.device, framework="abacus")]

    @classmethod
    def make(cls) -> Drafter:
        """A new body."""
        cls.require(DrafterNeed(dtype="float32", device=cls.device))
        return cast(Drafter, cls.body()(cls.context()))

    @classmethod
    def context(cls) -> WorkerContext:
        """Of a worker, where the draft models are of the target's form."""
        context, count = worker_context(cls.subject(), cls.device), cls._count()
        draft = DraftStart(choices=(), model=context.start.model, files=context.start.files)
        return replace(context, start=msgspec.structs.replace(context.start, drafts=(draft,) * count))

    @classmethod
    def _count(cls) -> int:
        return cls.num_models if "models" in cls._card().needs else 0

    @classmethod
    def _card(cls) -> type[DrafterCard]:
        return cast("type[DrafterCard]", cls.subject().card)

    def _context(self) -> WorkerContext:
        """That bodies are built with, made once."""
        if "_made" not in vars(self):
            self._made = self.context()
        return self._made

    def session(self, drafter: Drafter) -> ScriptedSession:
        """A body's. What its draft models keep is kept there."""
        sessions: dict[int, tuple[Drafter, ScriptedSession]] = vars(self).setdefault("_sessions", {})
        if id(drafter) not in sessions:
            size = self._context().start.model.hidden_size
            models = [self.played(size, seed, self.device) for seed in range(self._count())]
            sessions[id(drafter)] = drafter, ScriptedSession(models, self.rejects, self.captures)
        return sessions[id(drafter)][1]

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
        self.observe(drafter, table, rows.slot, rows.num_tokens - 1, counts, [len(drafts) for drafts in found])
        self._leave(drafter, rows, table)
        return found

    def observe(
        self, drafter: Drafter, table: torch.Tensor, slot: np.ndarray, first: np.ndarray, kept: np.ndarray,
        drafts: Sequence[int], draws: bool = True,
    ) -> None:  # fmt: skip
        """A step of the target that computes, of each row, the token at `first` and so many drafts, of which `kept`
        count; where the drafter's card says that it looks on. What it is shown follows from the table. A row of one
        token pads it.

        draws: False for a chunk of prompts, which has so many tokens more in place of drafts.
        """
        card = self._card()
        if not card.needs & OFFERS or not len(slot):
            return
        more = np.array(drafts, np.int32)
        context = self._context()
        model = context.start.model
        plan = StepPlan(
            step_id=0, slot_of_row=slot, num_computed=first.astype(np.int32), num_tokens=1 + more,
            samples=np.full(len(slot), draws), num_decodes=0, new_slots=[], new_blocks=[],
            num_drafts=more if draws and more.any() else None,
        )  # fmt: skip
        row = np.repeat(np.arange(len(slot)), plan.num_tokens)
        starts = np.append(0, np.cumsum(plan.num_tokens)).astype(np.int32)
        place = torch.from_numpy(first[row] + np.arange(len(row)) - starts[row]).long().to(self.device)
        tokens = table[torch.from_numpy(slot[row]).long().to(self.device)].clamp(max=VOCAB - 1)
        some = tokens.gather(1, place[:, None]) * 0.37 + place[:, None] * 0.11
        hidden = torch.sin(some + torch.arange(model.hidden_size, device=self.device)).to(context.dtype)
        hidden = F.pad(hidden, (0, 0, 0, 1), value=torch.nan)
        options = cast(DrafterOptions, context.options)
        step = Observed(
            plan,
            torch.from_numpy(np.append(starts, starts[-1] + 1)).to(self.device),
            hidden,
            {layer: hidden * (layer + 2) for layer in card.streams(model, options)},
            F.pad(tokens.gather(1, place[:, None] + 1)[:, 0], (0, 1)),
            torch.from_numpy((1 + kept).astype(np.int32)).to(self.device),
        )
        drafter.observe(step, self.session(drafter).at(table))

    def observe_prompt(self, drafter: Drafter, table: torch.Tensor, slot: int, length: int) -> None:
        """All of a request's tokens but the last are computed."""
        if length > 1:
            more = np.array([length - 2])
            self.observe(
                drafter, table, np.array([slot], np.int32), np.zeros(1, np.int64), more, more.tolist(), draws=False
            )

    def _enter(self, drafter: Drafter, rows: DraftRows, table: torch.Tensor) -> None:
        for slot, length in zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True):
            self.session(drafter).forget(slot)
            drafter.enter(self.new_slot(slot, table[slot, :length].tolist(), f"salt {self.entered}"))
            self.observe_prompt(drafter, table, slot, length)

    def _leave(self, drafter: Drafter, rows: DraftRows, table: torch.Tensor) -> None:
        for slot, length in zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True):
            drafter.leave(slot, length, self.session(drafter).at(table))

    def drafted(self, drafter: Drafter, rows: DraftRows, table: torch.Tensor) -> list[list[int]]:
        """The drafts that count, row by row; their form is checked, and that nothing is changed."""
        before, given = table.clone(), [column.copy() for column in rows]
        drafts = drafter.propose(rows, self.session(drafter).at(table, rows))
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
        if (parents := drafts.parents) is not None:
            options = cast(DrafterOptions, worker_context(self.subject(), self.device, with_ops=False).options)
            depth = self._card().branches(options)
            assert depth, "it proposes trees, and its card's `branches` does not say so"
            assert isinstance(parents, np.ndarray) and parents.dtype == np.int32 and parents.shape == (k,)
            assert ((parents >= -1) & (parents < np.arange(k))).all(), (
                "a draft follows one that does not stand before it"
            )
            deepest = int(seen_from(parents)[0].max())
            assert deepest <= depth, f"{deepest} drafts follow one another, and its card's `branches` says {depth}"
            assert drafts.probs is None, "the drafts of a tree are certain"
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
            prompt = life.first.token_ids
            table[slot, : len(prompt)] = torch.from_numpy(prompt).to(self.device)
            self.observe_prompt(alone, table, slot, len(prompt))
            for length, wanted, drafts, kept in life.steps:
                table[slot, :length] = torch.tensor(life.tokens[:length], dtype=torch.int32)
                rows = DraftRows(*(np.array([value], np.int32) for value in (slot, length, wanted)))
                again = self.drafted(alone, rows, table)
                assert again == [drafts], (
                    f"a request of {length} tokens in slot {life.first.slot} gets {drafts}, and alone {again[0]}: "
                    "something is left over from a request that may not share its history"
                )
                more = life.tokens[: length + kept + 1]
                table[slot, : len(more)] = torch.tensor(more, dtype=torch.int32)
                self.observe(alone, table, rows.slot, rows.num_tokens - 1, np.array([kept]), [len(drafts)])

    def test_drafts_follow_from_the_tokens(self) -> None:
        """Of a drafter that looks on at the target or has models: a request that got its tokens step by step, drafts
        that were not kept among them, gets what one gets that enters with them."""
        if not self._card().needs & OFFERS:
            not_served("it drafts from tokens alone")
        for life in self._live(self.make(), 5, lambda number: f"salt {number}"):
            for length, wanted, drafts, _ in life.steps[1:]:
                table = torch.full((SLOTS, LENGTH), NOBODYS, dtype=torch.int32, device=self.device)
                table[life.first.slot, :length] = torch.tensor(life.tokens[:length], dtype=torch.int32)
                rows = DraftRows(*(np.array([value], np.int32) for value in (life.first.slot, length, wanted)))
                fresh = self.make()
                self._enter(fresh, rows, table)
                assert self.drafted(fresh, rows, table) == [drafts], "something is left of drafts that were not kept"

    def test_drafts_of_captured_passes(self) -> None:
        """Of a drafter that asks for them: a session that captures the draws of its passes, and one that does not, give
        the same, step by step, whatever was kept of the drafts before."""
        lives = []
        for self.captures in (False, True):
            drafter = self.make()
            lives.append([life.steps for life in self._live(drafter, 5, lambda number: f"salt {number}")])
            if not self.session(drafter).asked:
                not_served("it asks for no drafts of captured passes")
        assert lives[0] == lives[1], "other drafts, or what was kept of them was not computed"

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
                drafter.leave(slot, length, self.session(drafter).at(table))
            for slot in [slot for slot in range(1, 7) if slot not in here and random.random() < 0.3]:
                tokens = (random.integers(0, letters, int(random.integers(1, 20))) * 7).tolist()
                here[slot] = life = Life(self.new_slot(slot, tokens, salt_of(len(lives))), [], tokens)
                lives.append(life)
                self.session(drafter).forget(slot)
                drafter.enter(life.first)  # what the slot held before still stands behind its tokens
                table[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
                self.observe_prompt(drafter, table, slot, len(tokens))
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
            self.observe(drafter, table, slots, lengths - 1, kept, [len(drafts) for drafts in found])
        return lives

    # -- probabilities -----------------------------------------------------------------------------------------------
    def _drawn(self, n: int) -> tuple[np.ndarray, torch.Tensor]:
        """First drafts of many rows, and the distributions that they were drawn from; skipped for certain drafts.

        The rows are long, so that no two are alike: equal texts may well get equal draws.
        """
        self.rejects = True
        n //= 4 if "models" in self._card().needs else 1  # a played model takes its time
        drafter, tokens, probs = self.make(), [], []
        for seed in range(-(-n // (SLOTS - 1))):
            rows, table = self.rows(seed, SLOTS - 1), self.table(seed)
            rows = rows._replace(num_tokens=np.maximum(rows.num_tokens, 24).astype(np.int32))
            self._enter(drafter, rows, table)
            drafts = drafter.propose(rows, self.session(drafter).at(table, rows))
            if drafts.probs is None:
                not_served("its drafts are certain: it returns no probabilities")
            counts = self._counts(rows, drafts)
            m, k = drafts.tokens.shape
            assert drafts.probs.dtype in (torch.float32, torch.float64)
            assert tuple(drafts.probs.shape) == (m, k, VOCAB)
            there = torch.from_numpy(counts > 0).to(self.device)
            tokens.append(drafts.tokens[there, 0].cpu().numpy())
            probs.append(drafts.probs[there, 0].double())
            self.observe(drafter, table, rows.slot, rows.num_tokens - 1, counts, counts.tolist())
            self._leave(drafter, rows, table)
        return np.concatenate(tokens), torch.cat(probs)

    def test_probabilities_are_a_distribution(self) -> None:
        """Not negative, and they add up to 1; the draft itself is possible."""
        tokens, probs = self._drawn(400)
        q = probs.cpu().numpy()
        assert (q >= 0).all() and np.allclose(q.sum(axis=1), 1, atol=1e-4), "they do not add up to 1"
        assert (q[np.arange(len(tokens)), tokens] > 0).all(), "a draft has probability 0"

    def test_drafts_are_drawn_from_their_probabilities(self) -> None:
        """Thousands of first drafts: how often each token is drafted, chi-square; and how likely each row's draft is
        by this row's own distribution."""
        tokens, probs = self._drawn(4000)
        q = probs.cpu().numpy()
        tail = chi_square_tail(np.bincount(tokens, minlength=VOCAB), q.sum(axis=0))
        assert tail > RARE, f"these counts have probability {tail:.1e}"
        tail = log_probability_tail(tokens, q)
        assert tail > RARE, f"so likely drafts have probability {tail:.1e}: q is sharper or flatter than the draw"

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

    # -- without torch -----------------------------------------------------------------------------------------------
    def test_tokens_of_numpy(self) -> None:
        """Of a driver of no framework: where the worker computes without torch, the table is numpy's on the host, and
        so are the drafts, which are the same. Its body brings no torch there."""
        if self._card().framework is not None:
            not_served(f"it computes with {self._card().framework}")
        module = (self._card().body or self.subject().candidate.value).partition(":")[0]
        code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == "False", f"importing {module} brings torch\n{done.stderr}"
        context = replace(self._context(), platform=None, ops=None, device=None, dtype=None)
        drafter, without = self.make(), cast(Drafter, self.body()(context))
        for seed in range(4):
            rows, table = self.rows(seed, 12), self.table(seed)
            session = ScriptedSession((), self.rejects)
            session.tokens = cast(torch.Tensor, table.cpu().numpy())
            wanted = self.proposed(drafter, rows, table)
            for slot, length in zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True):
                without.enter(self.new_slot(slot, table[slot, :length].tolist(), f"salt {self.entered}"))
            drafts = without.propose(rows, session)
            assert isinstance(drafts.tokens, np.ndarray), f"drafts are {type(drafts.tokens).__name__}, not numpy's"
            assert drafts.tokens.dtype == np.int32 and drafts.tokens.shape == (12, int(rows.num_drafts.max()))
            counts = rows.num_drafts if drafts.counts is None else drafts.counts
            found = [row[:n].tolist() for row, n in zip(drafts.tokens, counts.tolist(), strict=True)]
            assert found == wanted, "other drafts than of torch's tokens"
            for slot, length in zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True):
                without.leave(slot, length, session)

    @classmethod
    def figure(cls) -> str | None:
        """What a step's drafts cost."""
        if cls.subject().reasons(DrafterNeed(dtype="float32", device=cls.device)) or "models" in cls._card().needs:
            return None
        drafter, table = cls.make(), torch.arange(64 * 1001, dtype=torch.int32).view(64, 1001) % 97
        suite, table = cls(), table.to(cls.device)
        rows = DraftRows(np.arange(64, dtype=np.int32), np.full(64, 990, np.int32), np.full(64, 4, np.int32))
        session = suite.session(drafter).at(table, rows)
        suite._enter(drafter, rows, table)
        seconds = median_seconds(lambda: drafter.propose(rows, session), cls.device)
        return f"4 drafts for each of 64 rows of 990 tokens: {seconds * 1e6:,.0f} us"
