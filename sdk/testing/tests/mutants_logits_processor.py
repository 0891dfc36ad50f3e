"""Logits processors with one planted fault each, in the places of the reference drivers' bodies."""

from __future__ import annotations

from typing import Any

import torch
from mutant_suites import suites_of

from engine.interfaces.logits_processor import LogitsRows
from engine.types.plan import NewSlot
from engine_reference.logits_processors.card import LogitBiasProcessor
from engine_reference.logits_processors.processors import AllowedTokenIdsBody, BadWordsBody, LogitBiasBody
from engine_sdk.conformance import LogitsProcessorConformance


class RowsInOrder(LogitBiasBody):
    """the first rows are edited, whatever rows are named"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        super().apply(logits[: len(rows.slot)], rows._replace(row=None))


class EditsAll(LogitBiasBody):
    """every row of the batch is edited, by the first request's bias"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        logits[:, self._ids[rows.slot[0]]] += self._values[rows.slot[0]].to(logits.dtype)


class AddsForEver(LogitBiasBody):
    """the biases of a slot's earlier requests stay"""

    def enter(self, new: NewSlot) -> None:
        before = self._ids.clone(), self._values.clone()
        super().enter(new)
        old = before[1].shape[1]
        free = self._values[new.slot] == 0
        kept = torch.zeros_like(self._values[new.slot])
        kept[:old] = before[1][new.slot]
        self._values[new.slot] = torch.where(free, kept, self._values[new.slot])


class WrongSign(LogitBiasBody):
    """biases are taken away"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        self._values.neg_()
        super().apply(logits, rows)
        self._values.neg_()


class SetsInstead(LogitBiasBody):
    """logits are set to the bias"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        row = torch.arange(len(logits)) if rows.row is None else rows.row
        logits[row.unsqueeze(1), self._ids[rows.slot]] = self._values[rows.slot].to(logits.dtype)


class GrowsEachTime(LogitBiasBody):
    """the bias doubles with each call"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        super().apply(logits, rows)
        self._values *= 2


class DoesNothing(LogitBiasBody):
    """nothing is edited"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        pass


class OnePlace(LogitBiasBody):
    """a request in several rows is edited in the last of them"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        last = {int(slot): place for place, slot in enumerate(rows.slot.tolist())}
        index = torch.tensor(sorted(last.values()))
        row = torch.arange(len(logits)) if rows.row is None else rows.row
        super().apply(logits, rows._replace(row=row[index], slot=rows.slot[index]))


class OtherRows(LogitBiasBody):
    """a row's bias is scaled by the size of the batch"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        row = torch.arange(len(logits)) if rows.row is None else rows.row
        before = logits[row].clone()
        super().apply(logits, rows)
        logits[row] = before + (logits[row] - before) * (1 + 0.001 * len(logits))


class ForbidsTheAllowed(AllowedTokenIdsBody):
    """the allowed ids are the forbidden ones"""

    def enter(self, new: NewSlot) -> None:
        super().enter(new)
        self._forbidden[new.slot] = ~self._forbidden[new.slot]


class FirstAllowed(AllowedTokenIdsBody):
    """only the first of the allowed ids is allowed"""

    def enter(self, new: NewSlot) -> None:
        super().enter(new)
        self._forbidden[new.slot] = True
        self._forbidden[new.slot, new.params.allowed_token_ids[0]] = False


class CountsThePrompt(BadWordsBody):
    """a word may begin in the prompt"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        super().apply(logits, rows._replace(num_prompt=torch.zeros_like(rows.num_prompt)))


class ReadsAhead(BadWordsBody):
    """the end of the output is looked for one token too late"""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        super().apply(logits, rows._replace(num_tokens=rows.num_tokens + 1))


class LastTokens(BadWordsBody):
    """a word's last token is forbidden always"""

    def enter(self, new: NewSlot) -> None:
        super().enter(new)
        self._prefix[new.slot] = -1
        self._length[new.slot] = self._length[new.slot].clamp(max=0)


class RefusesNothing(LogitBiasProcessor):
    """ids outside the vocabulary are not refused"""

    @classmethod
    def verify(cls, params: Any, vocab_size: int) -> None:
        pass


class UsedByAll(LogitBiasProcessor):
    """every request is said to use it"""

    @classmethod
    def used_by(cls, params: Any) -> bool:
        return True


BIAS = [
    RowsInOrder, EditsAll, AddsForEver, WrongSign, SetsInstead, GrowsEachTime, DoesNothing, OnePlace, OtherRows,
]  # fmt: skip
ALLOWED = [ForbidsTheAllowed, FirstAllowed]
BAD_WORDS = [CountsThePrompt, ReadsAhead, LastTokens]
CARDS = [RefusesNothing, UsedByAll]
MUTANTS = [*BIAS, *ALLOWED, *BAD_WORDS, *CARDS]

globals().update(suites_of(LogitsProcessorConformance, "logit_bias", BIAS))
globals().update(suites_of(LogitsProcessorConformance, "allowed_token_ids", ALLOWED))
globals().update(suites_of(LogitsProcessorConformance, "bad_words", BAD_WORDS))
for name, made in suites_of(LogitsProcessorConformance, "logit_bias", CARDS).items():
    # These cards stand in a module with bodies: it is not their weight that is to be found.
    made.test_card_is_light = None
    globals()[name] = made
del name, made
