"""Drafters for tests of the real runner.

`draft_model` drafts with a small model of random weights, or with the target's own. `KnowingBody` knows the sequences
that requests get alone (the test puts them into `truths`) and proposes what comes next, wrong tokens, or a mixture, by
its option `kind`. `GuessingBody` draws drafts from distributions of its own and returns these. `LayerBody` reads the
target's hidden states.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal

import drafting
import msgspec
import numpy as np
import torch
from harness import CONFIG, HIDDEN, VOCAB, choice, registry

from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import DrafterCard, DrafterOptions, DraftRows, Drafts, DraftSession
from engine.interfaces.step import TargetStep
from engine.kv.layout import make_layout
from engine.plugin import Candidate
from engine.types.kv import KVLayout
from engine.types.model import CheckpointFiles, ModelDescription
from engine.types.parallel import Parallel
from engine.types.plan import NewSlot
from engine.types.start import DraftStart
from engine_reference.models.llama_card import Qwen2

WEIGHTS = torch.ones(VOCAB)
"""What `GuessingBody` weighs its distributions with."""


MODELS = {
    "copy": CONFIG,
    "model": {**CONFIG, "num_hidden_layers": 2, "num_key_value_heads": 4, "layer_types": CONFIG["layer_types"][1:]},
}
"""Draft models, by the kinds of drafter in `schedules.Settings`."""


class KnowingOptions(DrafterOptions):
    kind: Literal["right", "wrong", "random", "mixed"] = "right"


class Knowing(DrafterCard):
    Options = KnowingOptions
    needs = frozenset({"hidden"})
    body = "drafters:KnowingBody"


class Branching(DrafterCard):
    body = "drafters:BranchingBody"

    @classmethod
    def branches(cls, options: DrafterOptions) -> int:
        return BranchingBody.depth


class Guessing(DrafterCard):
    body = "drafters:GuessingBody"


CANDIDATES = tuple(
    Candidate("drafter", name, 1, "harness", "1", f"drafters:{card}")
    for name, card in (("knowing", "Knowing"), ("guessing", "Guessing"), ("branching", "Branching"), ("layer", "Layer"))
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

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        plan = step.plan
        drafts = np.zeros(plan.num_rows, np.int32) if plan.num_drafts is None else plan.num_drafts
        least = np.where(plan.samples, 1, plan.num_tokens)
        assert step.kept.shape == drafts.shape and (step.kept.numpy() >= least).all()
        assert (step.kept.numpy() <= plan.num_tokens).all() and (step.kept.numpy() >= plan.num_tokens - drafts).all()
        if plan.num_drafts is not None:
            self.kept += (step.kept.numpy() - 1)[plan.num_drafts > 0].tolist()


class Layer(DrafterCard):
    """Reads the target's hidden states."""

    needs = frozenset({"hidden", "streams"})
    body = "drafters:LayerBody"

    @classmethod
    def streams(cls, target: ModelDescription, options: DrafterOptions) -> tuple[int, ...]:
        return (1,)


class LayerBody:
    """One random layer over the target's last state, its stream behind layer 1 and the token that follows; then over
    what it has made itself. What it drafts is as good as chance; that it reads the right states, the test may ask."""

    def __init__(self, context: WorkerContext) -> None:
        generator = torch.Generator().manual_seed(6)
        self.embed, layer, head = (
            torch.randn(*shape, dtype=torch.float64, generator=generator)
            for shape in ((VOCAB, HIDDEN), (3 * HIDDEN, 2 * HIDDEN), (2 * HIDDEN, VOCAB))
        )
        self.layer = layer
        self.head = head
        self.features = torch.zeros(context.start.max_num_seqs, 2 * HIDDEN, dtype=torch.float64)
        self.observed = 0

    def enter(self, new: NewSlot) -> None:
        self.features[new.slot] = 0  # all but its last token may come from the cache: that is seen by nobody

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        pass

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        plan = step.plan
        assert step.hidden is not None and step.streams.keys() == {1}
        last = step.last
        features = torch.cat((step.hidden[last], step.streams[1][last]), dim=1)
        assert features.isfinite().all() and bool((step.next_tokens[last] >= 0).all())
        self.features[torch.from_numpy(plan.slot_of_row).long()] = features
        self.observed += plan.num_rows

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        slot, place = (torch.from_numpy(x).long() for x in (rows.slot, rows.num_tokens - 1))
        token, feature, drafts = session.tokens[slot, place].long(), self.features[slot], []
        for _ in range(int(rows.num_drafts.max())):
            feature = torch.tanh(torch.cat((feature, self.embed[token]), dim=1) @ self.layer)
            token = (feature @ self.head).argmax(dim=1)
            drafts.append(token.int())
        return Drafts(torch.stack(drafts, dim=1))


class BranchingBody(KnowingBody):
    """Proposes trees of random forms, each among all that follow one token at most once. Some path begins with what
    comes next."""

    depth: ClassVar[int] = 4

    def __init__(self, context: WorkerContext) -> None:
        self.rng = random.Random(0)
        self.kept: list[int] = []
        self.slots: dict[int, NewSlot] = {}

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        k, rng = int(rows.num_drafts.max()), self.rng
        parents: list[int] = []
        depths = {-1: 0}
        for node in range(k):
            parents.append(rng.choice([p for p in range(-1, node) if depths[p] < self.depth]))
            depths[node] = depths[parents[-1]] + 1
        tokens, counts = np.zeros((len(rows.slot), k), np.int32), np.zeros(len(rows.slot), np.int32)
        for i, (slot, n, most) in enumerate(zip(*(column.tolist() for column in rows), strict=True)):
            done = session.tokens[slot, :n].tolist()
            truth = next((t for t in self.truths if t[:n] == done), done)
            right, siblings = {-1}, dict[int, set[int]]()
            counts[i] = rng.choice([most, most, rng.randint(0, most)])
            for node, parent in enumerate(parents):
                place, used = n + depths[parent], siblings.setdefault(parent, set())
                may_be_right = parent in right and place < len(truth) and truth[place] not in used
                if may_be_right and rng.random() < 0.6:
                    tokens[i, node] = truth[place]
                    right.add(node)
                else:
                    others = set(range(VOCAB)) - used - set(truth[place : place + 1])
                    tokens[i, node] = rng.choice(sorted(others))
                used.add(int(tokens[i, node]))
        return Drafts(torch.from_numpy(tokens), counts, parents=np.array(parents, np.int32))


class GuessingBody(KnowingBody):
    """Each draft comes from softmax(noise), with noise that depends on the place only."""

    def __init__(self, context: WorkerContext) -> None:
        self.generator = torch.Generator().manual_seed(3)
        q = torch.softmax(torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5, dim=1) * WEIGHTS
        self.q = q / q.sum(dim=1, keepdim=True)
        self.kept = []
        self.slots = {}

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        m, k = len(rows.slot), int(rows.num_drafts.max())
        q = self.q[:k].expand(m, k, VOCAB)
        tokens = torch.multinomial(q.reshape(m * k, VOCAB), 1, generator=self.generator).view(m, k)
        return Drafts(tokens.int(), None, q)


def options(kind: str) -> tuple[str, dict[str, Any]]:
    """The driver and its options for a kind of drafter in `schedules.Settings`."""
    if kind == "layer":
        return "layer", {}
    if kind in MODELS:
        return "draft_model", {}
    if kind == "ngram":
        return "ngram", {"min_match": 1}
    if kind == "tree":
        return "branching", {}
    return "knowing", {"kind": kind}


def draft_starts(kind: str, parallel: Parallel | None = None, whole: bool = False) -> tuple[DraftStart, ...]:
    """The draft models of a kind of drafter. whole: every rank has them whole."""
    if kind not in MODELS:
        return ()
    found, config = registry(), MODELS[kind]
    model = Qwen2.describe(config)
    specs = tuple(msgspec.structs.replace(spec, model=1, divided=not whole) for spec in model.kv_specs)
    files = CheckpointFiles(name="random" if kind == "copy" else "other 6", folder="", weights=(), config=config)
    return (
        DraftStart(
            choices=(choice(found, "model", "Qwen2ForCausalLM"), choice(found, "checkpoint", "random")),
            model=msgspec.structs.replace(model, kv_specs=specs),
            files=files,
            parallel=Parallel() if whole or parallel is None else parallel.of_stage,
        ),
    )


def layout_with(drafts: tuple[DraftStart, ...], tp: int = 1, block: int = 8) -> KVLayout:
    """`harness.layout` with the draft models' layers."""
    sites = sum((draft.model.sites for draft in drafts), Qwen2.describe(CONFIG).sites)
    return make_layout(sites, block_size=block, kv_itemsize=8, tokens_per_page={}, size=tp)
