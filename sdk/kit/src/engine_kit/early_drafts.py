"""Drafts of several pipeline stages: the last one proposes them as soon as it has drawn what they follow.

The first stage embeds the drafts, so that it has to know them when the step begins that computes them. What is proposed
here goes to the scheduler with the step's result, which has the next plan of the row bring as many as it wants.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.interfaces.drafter import DraftRows, Drafts
from engine.interfaces.step import StepOutput, StepPart, TargetStep
from engine.types.plan import GivenDrafts, StepResult
from engine.types.start import WorkerStart

if TYPE_CHECKING:
    import torch

    from engine.interfaces.platform import Platform


class Proposes(Protocol):
    """The drafter in the runner's hands: `engine.runner.drafting.Drafting`."""

    probs: dict[int, torch.Tensor]

    @property
    def rejects(self) -> bool: ...
    def proposed(self, rows: DraftRows) -> Drafts | None: ...


class Limited(Protocol):
    """What the drafter sees of the runner: `engine.runner.session.Session`."""

    tokens: torch.Tensor
    limit: np.ndarray


class Faulty(Protocol):
    """Slots over which a driver has raised: `engine.sampling.faults.SlotFaults`."""

    def among(self, slots: np.ndarray) -> np.ndarray | None: ...


class EarlyDrafts(StepPart):
    """Proposes behind each step, and behind the drafter's look at it.

    Args:
        start: sizes, and whether the drafter has models.
        drafting, session, platform, faults: the runner's.
        num_tokens: the most drafts of a row.
    """

    def __init__(
        self,
        start: WorkerStart,
        drafting: Proposes,
        session: Limited,
        platform: Platform,
        faults: Faulty,
        num_tokens: int,
    ) -> None:
        self._drafting = drafting
        self._session = session
        self._platform = platform
        self._faults = faults
        self._num_tokens = num_tokens
        self._max_model_len = start.max_model_len
        self._block_size = start.layout.block_size if start.drafts else 0

    def launched(self, step: TargetStep) -> StepOutput | None:
        """What is to follow the tokens that a step has drawn. Where it had drafts, the host waits to know these."""
        plan = step.plan
        place = np.flatnonzero(plan.samples)
        if not place.size:
            return None
        kept = plan.num_tokens
        if plan.num_drafts is not None:
            kept = self._platform.to_host((step.kept,)).wait()[0].numpy()
        slot, num_tokens = plan.slot_of_row[place], (plan.num_computed + kept + 1)[place]
        room = self._max_model_len - num_tokens
        if self._block_size:  # nobody has given these rows new pages: a draft model has what is left of the last one
            blocks = -(-(plan.num_computed + plan.num_tokens)[place] // self._block_size)
            self._session.limit[slot] = np.minimum(blocks * self._block_size, self._max_model_len)
            room = np.minimum(room, blocks * self._block_size + 1 - num_tokens)
        for one in slot.tolist():
            self._drafting.probs.pop(one, None)
        wanted = room > 0
        if (faulty := self._faults.among(slot)) is not None:
            wanted &= ~faulty
        if not wanted.any():
            return None
        counts = np.minimum(room, self._num_tokens).astype(np.int32)[wanted]
        rows = DraftRows(slot[wanted], num_tokens[wanted].astype(np.int32), counts)
        drafts = self._drafting.proposed(rows)
        if drafts is None:
            return None
        if self._drafting.rejects and drafts.probs is not None:
            self._drafting.probs |= dict(zip(rows.slot.tolist(), drafts.probs, strict=True))
        counts = counts if drafts.counts is None else drafts.counts
        return StepOutput((drafts.tokens,), partial(_put, place[wanted].astype(np.int32), counts))


def _put(row: np.ndarray, counts: np.ndarray, result: StepResult, arrays: list[np.ndarray]) -> None:
    (tokens,) = arrays
    found = np.where(np.arange(tokens.shape[1]) < counts[:, None], tokens, -1)
    result.proposed = GivenDrafts(row=row, tokens=found.astype(np.int32))
