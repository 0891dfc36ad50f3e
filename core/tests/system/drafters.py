"""Drafters for tests of the real runner.

`KnowingBody` knows the sequences that requests get alone (the test puts them into `truths`) and proposes what comes
next, wrong tokens, or a mixture, by its option `kind`. `GuessingBody` draws drafts from distributions of its own and
returns these.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal

import drafting
import numpy as np
import torch
from harness import VOCAB

from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import DrafterCard, DrafterOptions, DraftRows, Drafts, DraftSession
from engine.plugin import Candidate
from engine.types.plan import NewSlot

WEIGHTS = torch.ones(VOCAB)
"""What `GuessingBody` weighs its distributions with."""


class KnowingOptions(DrafterOptions):
    kind: Literal["right", "wrong", "random", "mixed"] = "right"


class Knowing(DrafterCard):
    Options = KnowingOptions
    body = "drafters:KnowingBody"


class Guessing(DrafterCard):
    body = "drafters:GuessingBody"


CANDIDATES = tuple(
    Candidate("drafter", name, 0, "harness", "1", f"drafters:{card}")
    for name, card in (("knowing", "Knowing"), ("guessing", "Guessing"))
)


class KnowingBody:
    truths: ClassVar[list[list[int]]] = []
    """Whole sequences, prompts included."""
    exact: ClassVar[bool] = False
    """Every request has one of them."""

    def __init__(self, context: WorkerContext) -> None:
        self.propose_one = drafting.make(context.options.kind, VOCAB)
        self.rng = random.Random(0)
        self.kept: list[int] = []
        self.slots: dict[int, NewSlot] = {}

    def enter(self, new: NewSlot) -> None:
        assert new.slot not in self.slots, "a slot is entered that nobody has left"
        self.slots[new.slot] = new

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        new, tokens = self.slots.pop(slot), session.tokens[slot, :num_tokens].tolist()
        assert tokens[: len(new.token_ids)] == new.token_ids.tolist(), "the slot's tokens are another request's"
        assert not self.exact or tokens in [truth[:num_tokens] for truth in self.truths], tokens

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        assert set(rows.slot.tolist()) <= self.slots.keys(), "drafts are wanted for a slot that nobody has entered"
        k = int(rows.num_drafts.max())
        tokens, counts = np.zeros((len(rows.slot), k), np.int32), np.zeros(len(rows.slot), np.int32)
        for i, (slot, n, most) in enumerate(zip(*(column.tolist() for column in rows), strict=True)):
            done = session.tokens[slot, :n].tolist()
            truth = next((t for t in self.truths if t[:n] == done), done)
            drafts = self.propose_one(truth, done, most)
            counts[i] = len(drafts)
            tokens[i, : len(drafts)] = drafts
        return Drafts(torch.from_numpy(tokens), counts)

    def accepted(self, rows: DraftRows, counts: torch.Tensor) -> None:
        assert counts.shape == rows.slot.shape and bool((counts >= 0).all())
        assert (counts.numpy() <= rows.num_drafts).all()
        self.kept += counts.tolist()


class GuessingBody(KnowingBody):
    """Each draft comes from softmax(noise), with noise that depends on the place only."""

    def __init__(self, context: WorkerContext) -> None:
        self.generator = torch.Generator().manual_seed(3)
        q = torch.softmax(torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5, dim=1) * WEIGHTS
        self.q = q / q.sum(dim=1, keepdim=True)
        self.kept, self.slots = [], {}

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        m, k = len(rows.slot), int(rows.num_drafts.max())
        q = self.q[:k].expand(m, k, VOCAB)
        tokens = torch.multinomial(q.reshape(m * k, VOCAB), 1, generator=self.generator).view(m, k)
        return Drafts(tokens.int(), None, q)


def options(kind: str) -> tuple[str, dict[str, Any]]:
    """The driver and its options for a kind of drafter in `schedules.Settings`."""
    if kind == "ngram":
        return "ngram", {"min_match": 1}
    return "knowing", {"kind": kind}
