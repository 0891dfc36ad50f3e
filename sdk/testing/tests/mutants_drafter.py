"""Drafters with one planted fault each: of the reference driver, and of one that draws its drafts."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from mutant_suites import suites_of
from plain_drafter_card import ModelDrafter, ObservingDrafter, PlainDrafter, TreeDrafter

from engine.interfaces.drafter import DraftBatch, DraftRows, Drafts, DraftSession
from engine.interfaces.step import TargetStep
from engine.types.plan import NewSlot
from engine_kit.philox import uniform
from engine_reference.drafter_ngram.ngram import NgramDrafterBody
from engine_sdk.conformance import DrafterConformance

VOCAB = 256


class Plain:
    """Right: q is a function of the token before, the draw one of the request's tokens and the position."""

    def __init__(self, context: Any) -> None:
        self.q = np.random.default_rng(0).dirichlet(np.full(VOCAB, 0.3), VOCAB)

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        m, k = len(rows.slot), int(rows.num_drafts.max())
        tokens, probs = np.zeros((m, k), np.int32), np.zeros((m, k, VOCAB))
        table = session.tokens.numpy()
        for i, (slot, length) in enumerate(zip(rows.slot, rows.num_tokens, strict=True)):
            own = table[slot, :length]
            last, seed = int(own[-1]), int((own.astype(np.int64) * (np.arange(length) + 1)).sum())
            for j in range(k):
                weights = self.q[last]
                u = uniform(np.array([seed]), np.array([length + j]), 9)[0]
                last = int(np.searchsorted(np.cumsum(self.drawn_from(weights)), u * 0.999999))
                tokens[i, j], probs[i, j] = last, self.told(weights)
        return Drafts(torch.from_numpy(tokens), None, torch.from_numpy(probs))

    def drawn_from(self, weights: np.ndarray) -> np.ndarray:
        return weights

    def told(self, weights: np.ndarray) -> np.ndarray:
        return weights

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        pass

    def enter(self, new: NewSlot) -> None:
        pass

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        pass


class Session(NamedTuple):
    """A session with another table."""

    tokens: torch.Tensor


class Unnormalised(Plain):
    """unnormalised draft: the probabilities add up to 0.9"""

    def told(self, weights: np.ndarray) -> np.ndarray:
        return weights * 0.9


class TellsAnother(Plain):
    """drafts are drawn at another temperature than their probabilities say"""

    def told(self, weights: np.ndarray) -> np.ndarray:
        return weights**0.7 / (weights**0.7).sum()


class Argmax(Plain):
    """the most likely token is drafted always, and told as a draw"""

    def drawn_from(self, weights: np.ndarray) -> np.ndarray:
        return np.eye(VOCAB)[weights.argmax()]


class Impossible(Plain):
    """the draft's own probability is told as 0"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        probs = drafts.probs.scatter(2, drafts.tokens.long().unsqueeze(2), 0.0)
        return drafts._replace(probs=probs / probs.sum(-1, keepdim=True))


class RanksDiffer(Plain):
    """each rank draws by random numbers of its own"""

    count = itertools.count()

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.q = np.roll(self.q, next(self.count), axis=1)


class TooMany(NgramDrafterBody):
    """counts say more drafts than were wanted"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(counts=np.full_like(drafts.counts, drafts.tokens.shape[1]))


class LongTokens(NgramDrafterBody):
    """drafts are int64"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(tokens=drafts.tokens.long())


class ReadsPastTheEnd(NgramDrafterBody):
    """tokens behind the row's own are read: a slot is taken to be full"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        more = np.minimum(rows.num_tokens + 5, session.tokens.shape[1] - 1).astype(np.int32)
        return super().propose(rows._replace(num_tokens=more), session)


class WrongSlot(NgramDrafterBody):
    """a row's place is taken for its slot"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        return super().propose(rows._replace(slot=np.arange(len(rows.slot), dtype=np.int32)), session)


class WritesTheTable(NgramDrafterBody):
    """drafts are written behind the row's tokens"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        session.tokens[rows.slot[0], rows.num_tokens[0]] = 255
        return drafts


class FirstRowsCount(NgramDrafterBody):
    """all rows get as many drafts as the first one wants"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(counts=np.minimum(drafts.counts, rows.num_drafts[0]).astype(np.int32))


class Narrow(NgramDrafterBody):
    """as many columns as the first row wants"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(tokens=drafts.tokens[:, : int(rows.num_drafts[0])])


class OutsideVocabulary(NgramDrafterBody):
    """drafts are no ids of the vocabulary"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(tokens=drafts.tokens + 1000)


class TensorsAlways(NgramDrafterBody):
    """drafts are torch's, where the table of tokens is numpy's too"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(tokens=torch.as_tensor(drafts.tokens))


class NothingOfNumpy(NgramDrafterBody):
    """nothing is drafted where the table of tokens is numpy's"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(counts=drafts.counts * (not isinstance(drafts.tokens, np.ndarray)))


class KeepsTexts(NgramDrafterBody):
    """a slot's text is kept from step to step, and goes on when the slot has changed hands"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.texts: dict[int, list[int]] = {}

    def text(self, slot: int, num_tokens: int) -> list[int]:
        return self.texts.setdefault(slot, [])

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        table = session.tokens.clone()
        for slot, n in zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True):
            text = self.text(slot, n)
            text += session.tokens[slot, len(text) : n].tolist()
            table[slot, :n] = torch.tensor(text[:n])
        return super().propose(rows, Session(table))


class NoticesShorterTexts(KeepsTexts):
    """that a slot has changed hands is noticed by a text that is shorter than before, and by nothing else"""

    def text(self, slot: int, num_tokens: int) -> list[int]:
        if len(self.texts.get(slot, [])) > num_tokens:
            del self.texts[slot]
        return super().text(slot, num_tokens)


class ForgetsWhenLeft(KeepsTexts):
    """what is kept of a slot is forgotten by the number of another one"""

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        self.texts.pop(slot + 1, None)


class DraftsNothing(NgramDrafterBody):
    """nothing is ever drafted"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(counts=np.zeros_like(drafts.counts))


class Backwards(NgramDrafterBody):
    """drafts come in reverse order"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(tokens=drafts.tokens.flip(1))


# -- of one that learns from who has left -----------------------------------------------------------------------------
class Learns(NgramDrafterBody):
    """Right: a row whose own text has no match goes on as the last text did that ended, of those with its salt."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.salts: dict[int, str | None] = {}
        self.texts: dict[str | None, list[int]] = {}

    def whose(self, slot: int) -> str | None:
        return self.salts[slot]

    def enter(self, new: NewSlot) -> None:
        self.salts[new.slot] = new.cache_salt

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        self.texts[self.whose(slot)] = session.tokens[slot, :num_tokens].tolist()

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        for i, (slot, n, most) in enumerate(zip(*(column.tolist() for column in rows), strict=True)):
            text, last = self.texts.get(self.whose(slot), []), int(session.tokens[slot, n - 1])
            if not drafts.counts[i] and last in text[:-1]:
                found = text[len(text) - 1 - text[-2::-1].index(last) :][:most]
                drafts.tokens[i, : len(found)], drafts.counts[i] = torch.tensor(found), len(found)
        return drafts


class OneHistory(Learns):
    """what was learned from one request is used for another that may not share its history"""

    def whose(self, slot: int) -> str | None:
        return None


class LearnsTooMuch(Learns):
    """what stands behind a text that has ended is learned too"""

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        super().leave(slot, num_tokens + 8, session)


# -- of one that looks on at the target -------------------------------------------------------------------------------
class LooksOn(Plain):
    """Right: one random layer over the state of the last token that counts, and what it drafted itself."""

    def __init__(self, context: Any) -> None:
        size, random = context.start.model.hidden_size, torch.Generator().manual_seed(1)
        self.head = torch.randn(size, VOCAB, generator=random)
        self.states = torch.zeros(64, size)

    def enter(self, new: NewSlot) -> None:
        self.states[new.slot] = 0

    def last(self, step: TargetStep) -> torch.Tensor:
        return step.last

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        assert step.hidden is not None
        self.states[torch.from_numpy(step.plan.slot_of_row).long()] = step.hidden[self.last(step)].float()

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        states = self.states[torch.from_numpy(rows.slot).long()]
        last = session.tokens[rows.slot, rows.num_tokens - 1].long()
        first = ((states @ self.head).argmax(dim=1) + last) % VOCAB
        return Drafts(((first[:, None] + torch.arange(int(rows.num_drafts.max()))) % VOCAB).int())


class KeepsAnothersState(LooksOn):
    """the state of whoever had the slot before stays until a step of the new request is observed"""

    def enter(self, new: NewSlot) -> None:
        pass


class TakesTheNextRowsState(LooksOn):
    """the state behind a row's own is taken, of the next row's first token"""

    def last(self, step: TargetStep) -> torch.Tensor:
        return (super().last(step) + 1) % len(step.next_tokens)


# -- of one with a model -----------------------------------------------------------------------------------------------
class WithModel(LooksOn):
    """Right: the model runs over every step, on the target's states; drafts go on from its state of the last token that
    counts, each from the one before."""

    def __init__(self, context: Any) -> None:
        self.states = torch.zeros(64, context.start.model.hidden_size, dtype=torch.float64)

    def features(self, step: TargetStep) -> torch.Tensor:
        assert step.hidden is not None
        return step.hidden

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        hidden = session.run_step(0, step, self.features(step))
        self.states[torch.from_numpy(step.plan.slot_of_row).long()] = hidden[self.last(step)]

    def start(self, rows: DraftRows, ahead: int) -> np.ndarray:
        return rows.num_tokens - 2 + ahead

    def slot(self, rows: DraftRows) -> np.ndarray:
        return rows.slot

    def told(self, q: torch.Tensor) -> torch.Tensor:
        return q

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        states, tokens, probs = self.states[torch.from_numpy(rows.slot).long()], [], []
        for ahead in range(int(rows.num_drafts.max())):
            if ahead:
                batch = DraftBatch(self.slot(rows), self.start(rows, ahead), 1, tokens[-1], states)
                states = session.run(0, batch)
            token, q = session.draw(session.model().logits(states), rows, ahead)
            tokens.append(token)
            probs += [] if q is None else [self.told(q)]
        return Drafts(torch.stack(tokens, 1), None, torch.stack(probs, 1) if probs else None)


class ModelInAnotherSlot(WithModel):
    """the draft model's pass goes on in another row's slot"""

    def slot(self, rows: DraftRows) -> np.ndarray:
        return np.roll(rows.slot, 1)


class StaleFeature(WithModel):
    """the state of a row's last token is kept, though it may be behind a draft that was not kept"""

    def last(self, step: TargetStep) -> torch.Tensor:
        return step.query_start_loc[1 : 1 + step.plan.num_rows].long() - 1


class KeepsRejectedKV(WithModel):
    """the draft model does not run over steps with drafts: what it kept of wrong ones stays"""

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        if step.plan.num_drafts is None:
            super().observe(step, session)
        else:
            slots = torch.from_numpy(step.plan.slot_of_row).long()
            self.states[slots] = self.features(step)[self.last(step)].double()


class WrongPosition(WithModel):
    """the first pass stands a position too far on, over a token of which nothing is kept"""

    def start(self, rows: DraftRows, ahead: int) -> np.ndarray:
        return super().start(rows, ahead + 1)


class SharpenedQ(WithModel):
    """the distribution that is told is sharper than the one that drafts are drawn from"""

    def told(self, q: torch.Tensor) -> torch.Tensor:
        return q**1.3 / (q**1.3).sum(dim=1, keepdim=True)


class LeavesTheLastOut(WithModel):
    """the last of a session's drafts is taken for computed, which it is not"""

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        if step.plan.num_drafts is None:
            session.run_step(0, step)

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = session.draft(0, rows)
        if drafts is not None:
            return Drafts(drafts)
        token, chosen = session.tokens[rows.slot, rows.num_tokens - 1], []
        for ahead in range(int(rows.num_drafts.max())):
            hidden = session.run(0, DraftBatch(rows.slot, rows.num_tokens - 1 + ahead, 1, token))
            token, _ = session.draw(session.model().logits(hidden), rows, ahead)
            chosen.append(token)
        session.run(0, DraftBatch(rows.slot, rows.num_tokens - 1 + len(chosen), 1, token))
        return Drafts(torch.stack(chosen, 1))


class Branching(Plain):
    """Right: drafts 2 i + 1 and 2 i + 2 follow draft i, and the first two the row's last token."""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        k = int(rows.num_drafts.max())
        tokens = torch.empty(len(rows.slot), k, dtype=torch.int32)
        last = session.tokens.numpy()[rows.slot, rows.num_tokens - 1]
        for node in range(k):
            before = last if node < 2 else tokens[:, node // 2 - 1].numpy()
            tokens[:, node] = torch.from_numpy((before * 3 + node % 2 + 1) % VOCAB)
        return Drafts(tokens, parents=self.parents(np.arange(k)))

    def parents(self, node: np.ndarray) -> np.ndarray | None:
        return (node // 2 - 1).astype(np.int32)


class FollowsItself(Branching):
    """tree parent off by one: a draft follows one that does not stand before it"""

    def parents(self, node: np.ndarray) -> np.ndarray:
        return (node // 2).astype(np.int32)


class WideParents(Branching):
    """parents are int64"""

    def parents(self, node: np.ndarray) -> np.ndarray:
        return node // 2 - 1


class DrawsTrees(Branching):
    """the drafts of a tree come with probabilities"""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        drafts = super().propose(rows, session)
        return drafts._replace(probs=torch.ones(*drafts.tokens.shape, VOCAB) / VOCAB)


class GrowsDeeper(Branching):
    """more drafts follow one another than the card says"""

    def parents(self, node: np.ndarray) -> np.ndarray:
        return (node - 1).astype(np.int32)


WITH_TREES = [FollowsItself, WideParents, DrawsTrees, GrowsDeeper]
WITH_MODEL = [ModelInAnotherSlot, StaleFeature, KeepsRejectedKV, WrongPosition, SharpenedQ, LeavesTheLastOut]
LOOKING_ON = [KeepsAnothersState, TakesTheNextRowsState]
LEARNING = [OneHistory, LearnsTooMuch]
DRAWN = [Unnormalised, TellsAnother, Argmax, Impossible, RanksDiffer]
CERTAIN = [
    TooMany, LongTokens, ReadsPastTheEnd, WrongSlot, WritesTheTable, FirstRowsCount, Narrow, OutsideVocabulary,
    TensorsAlways, NothingOfNumpy, KeepsTexts, NoticesShorterTexts, ForgetsWhenLeft, DraftsNothing, Backwards,
]  # fmt: skip
MUTANTS = [*DRAWN, *CERTAIN, *LEARNING, *LOOKING_ON, *WITH_MODEL, *WITH_TREES]

globals().update(suites_of(DrafterConformance, PlainDrafter, DRAWN))
globals().update(suites_of(DrafterConformance, "ngram", [*CERTAIN, *LEARNING]))
globals().update(suites_of(DrafterConformance, ObservingDrafter, LOOKING_ON))
globals().update(suites_of(DrafterConformance, ModelDrafter, WITH_MODEL))
globals().update(suites_of(DrafterConformance, TreeDrafter, WITH_TREES))


class TestUnbroken(DrafterConformance):
    card = PlainDrafter


class TestBranches(DrafterConformance):
    card = TreeDrafter


class TestLooksOn(DrafterConformance):
    card = ObservingDrafter


class TestWithModel(DrafterConformance):
    card = ModelDrafter


class TestLearns(DrafterConformance):
    """What the last mutants are made of passes."""

    driver = "ngram"

    @classmethod
    def body(cls) -> type:
        return Learns
