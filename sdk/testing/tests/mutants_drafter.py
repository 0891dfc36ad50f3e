"""Drafters with one planted fault each: of the reference driver, and of one that draws its drafts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from mutant_suites import suites_of
from plain_drafter_card import PlainDrafter

from engine.interfaces.drafter import DraftRows, Drafts, DraftSession
from engine_kit.philox import uniform
from engine_reference.drafter_ngram.body import NgramDrafterBody
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

    def accepted(self, rows: DraftRows, counts: torch.Tensor) -> None:
        pass


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


DRAWN = [Unnormalised, TellsAnother, Argmax, Impossible, RanksDiffer]
CERTAIN = [
    TooMany, LongTokens, ReadsPastTheEnd, WrongSlot, WritesTheTable, FirstRowsCount, Narrow, OutsideVocabulary,
    DraftsNothing, Backwards,
]  # fmt: skip
MUTANTS = [*DRAWN, *CERTAIN]

globals().update(suites_of(DrafterConformance, PlainDrafter, DRAWN))
globals().update(suites_of(DrafterConformance, "ngram", CERTAIN))


class TestUnbroken(DrafterConformance):
    card = PlainDrafter
