"""Drafts of a draft model, one after the other, with one launch for each: a step's inputs from the tables of slots, the
model, its logits, the draw, and the draft where the next pass reads it. Elsewhere each of these is launched by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import Protocol

import numpy as np
import torch

from engine.interfaces.drafter import DraftRows
from engine.interfaces.model import Model
from engine.interfaces.ops import Ops, SamplingRows, StepInputs, StepTables
from engine.interfaces.platform import CaptureKey, Platform, Trial
from engine.types.kv import NULL_PAGE
from engine.types.plan import StepPlan


class Frame(Protocol):
    """The fixed buffers of a step of rows of one token: `engine.runner.buffers.StepInputBuffers`."""

    num_rows: int
    inputs: StepInputs
    header_host: np.ndarray


class Sent(Protocol):
    """What of a step is on the device: `engine.runner.buffers.Sent`."""

    places: torch.Tensor | None


class Buffers(Protocol):
    """Fills them: `engine.runner.buffers.StepBuffers`."""

    def fill(self, frame: Frame, plan: StepPlan, *, places: np.ndarray) -> Sent: ...


class Pass(Protocol):
    """A pass of the model alone: `engine.runner.step.Step`. `hidden`: [R, H], where it leaves them."""

    hidden: torch.Tensor | None


class Uploaded(Protocol):
    """How rows draw, on the device."""

    slot: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor


class Sampler(Protocol):
    """Of drafts: `engine.sampling.sampler.Sampler`. `uploaded` gives the same object for the same rows."""

    def uploaded(self, slots: np.ndarray) -> Uploaded: ...
    def places(self, rows: DraftRows) -> np.ndarray: ...


class DraftPass:
    """Passes of one bucket, of one model.

    Args:
        platform, ops, buffers: the worker's. tables: of its slots, the last of which is padding's.
        sampler: of drafts.
        limit: int32 [slots]; the tokens that each has pages for.
        vocab_size: of the models.
        skips_padding: see `engine.interfaces.platform.PlatformCard`.
        frame: of a pass. attend: plans attention for it.
    """

    calls = ("prepare_inputs", "draw", "place_tokens")
    """Operations that have to be recorded beside the model's."""

    def __init__(
        self,
        platform: Platform,
        ops: Ops,
        tables: StepTables,
        buffers: Buffers,
        sampler: Sampler,
        limit: np.ndarray,
        vocab_size: int,
        skips_padding: bool,
        frame: Frame,
        attend: Callable[[], None],
    ) -> None:
        self._platform = platform
        self._ops = ops
        self._tables = tables
        self._buffers = buffers
        self._sampler = sampler
        self._limit = limit
        self._vocab_size = vocab_size
        self._skips_padding = skips_padding
        self._frame = frame
        self._attend = attend
        self._padding = len(tables.tokens) - 1
        rows = frame.num_rows
        self._host_places = np.zeros((2, rows), np.int64)
        nobody = np.zeros(rows, np.int32)
        places = self._buffers.fill(self._frame, _decodes(nobody, nobody), places=self._host_places).places
        assert places is not None
        self._places = places  # lie there in every pass
        make = partial(torch.zeros, rows, device=platform.device)
        self._slot = make(dtype=torch.int64)
        self._rows = SamplingRows(
            make(dtype=torch.float32), make(dtype=torch.int32), make(dtype=torch.float32), make(dtype=torch.float32),
            make(dtype=torch.int64), places[1],
        )  # fmt: skip
        self._uploaded: Uploaded | None = None
        self._drawn: list[torch.Tensor] = []
        self._replay: Callable[..., None] | None = None

    def capture(
        self, forward: Callable[[], None], left: Pass, model: Model, key: CaptureKey, trial: Trial, pool: torch.Tensor
    ) -> bool:
        """Whether it is captured; else the platform has told why not.

        Args:
            forward: from the frame's inputs to the hidden states that are `left`. trial: of it.
            model: that gives their logits.
            pool: whose null page is every block of every slot.
        """
        tokens = self._tables.tokens

        def compute() -> None:
            self._ops.prepare_inputs(self._tables, self._frame.inputs)
            forward()
            assert left.hidden is not None
            drawn, broken = self._ops.draw(model.logits(left.hidden), self._rows)
            self._ops.place_tokens(drawn, broken, tokens, self._slot, self._places[0])
            self._drawn[:] = [drawn]

        def prepare(number: int) -> None:
            trial.prepare(number)
            pool[NULL_PAGE] = 0
            # All rows are the first slot's: those that stand at the same place leave the same there.
            tokens[0] = (
                torch.arange(tokens.shape[1], device=tokens.device) * 7919 + 31 * number + 1
            ) % self._vocab_size
            self._slot.fill_(self._padding)
            self._rows.temperature.fill_(number)
            self._rows.top_p.fill_(1)

        outputs = partial(tuple[torch.Tensor, ...], self._drawn)
        tried = Trial(prepare, outputs, partial(setitem, self._drawn, slice(None)))
        replay = self._platform.capture(compute, key._replace(variant=("drawn",)), tried)
        self._replay = None if replay is compute else replay
        return self._replay is not None

    def __call__(self, rows: DraftRows) -> torch.Tensor:
        """See `engine.interfaces.drafter.DraftSession.draft`."""
        assert self._replay is not None
        m, k, first = len(rows.slot), int(rows.num_drafts.max()), rows.num_tokens - 1
        counted = [m] if self._skips_padding else []
        alike = int((self._limit[rows.slot] - first).min())  # so many passes have pages for all rows
        drafts = torch.empty(m, k, dtype=torch.int32, device=self._slot.device)
        self._take(self._sampler.uploaded(rows.slot), m)
        for ahead in range(k):
            if 0 < ahead < alike:
                self._advance(m)
            else:
                self._fill(rows, first + ahead)
            self._attend()
            self._replay(*counted)
            drafts[:, ahead] = self._drawn[0][:m]
        return drafts

    def _take(self, uploaded: Uploaded, m: int) -> None:
        """How the rows draw, where the captured draw reads it."""
        if uploaded is self._uploaded:
            return
        self._uploaded = uploaded
        own = (self._slot, *self._rows[:5])
        theirs = (uploaded.slot, uploaded.temperature, uploaded.top_k, uploaded.top_p, uploaded.min_p, uploaded.seed)
        for to, of in zip(own, theirs, strict=True):
            to[:m] = of
        self._slot[m:] = self._padding

    def _fill(self, rows: DraftRows, start: np.ndarray) -> None:
        """The pass that computes the tokens at `start`. A row that has no page there is computed in padding's slot, and
        what it draws is not read."""
        fits, m = start < self._limit[rows.slot], len(start)
        at = np.minimum(start + 1, self._tables.tokens.shape[1] - 1)
        self._host_places[:, :m] = self._sampler.places(rows._replace(num_tokens=at))
        self._host_places[:, m:] = 0
        plan = _decodes(np.where(fits, rows.slot, self._padding).astype(np.int32), np.where(fits, start, 0))
        self._buffers.fill(self._frame, plan, places=self._host_places)

    def _advance(self, m: int) -> None:
        """The pass behind the last one, of the same rows."""
        self._frame.header_host[1:3, :m] += 1  # computed tokens and lengths
        self._frame.inputs.num_computed.add_(1)
        self._frame.inputs.seq_lens.add_(1)
        self._places.add_(1)


def _decodes(slot: np.ndarray, start: np.ndarray) -> StepPlan:
    return StepPlan(
        step_id=0,
        slot_of_row=slot,
        num_computed=start,
        num_tokens=np.ones(len(slot), np.int32),
        samples=np.ones(len(slot), bool),
        num_decodes=len(slot),
        new_slots=[],
        new_blocks=[],
    )
