"""One launch of the model: what it reads and leaves behind, where it draws, and what parts see of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.interfaces.platform import Fetch, Platform
from engine.interfaces.step import LayerListener
from engine.runner.buffers import SlotTables, StepInputBuffers
from engine.sampling.packed import send
from engine.types.plan import StepPlan


@dataclass(slots=True)
class Step:
    """What a launch of the model reads and leaves behind: `run` is what `platform.capture` gets.

    Args:
        frame: the inputs.
        plans: attention's, one for each group; refilled step after step where the step is captured.
        more: what parts add to the model's state.
        select: int64 [n]; tokens whose logits are wanted, None for all.
        hidden: [T, H], kept for parts that read it.
        left: what the next pipeline stage goes on with; None on the last one.
        logits: [n, V], the model's own, where `run` leaves them. A replay fills the tensor that the capture left.
        run: the launch. whole: that of all that a plain decode step is; see `engine.interfaces.step.WholeSteps`.
        listeners: who look on between layers. plan: which they see; None where the step is captured.
        streams: what they have recorded, by layer: [T, H].
    """

    frame: StepInputBuffers
    plans: list[Any]
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    select: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    left: tuple[torch.Tensor, ...] | None = None
    logits: torch.Tensor | None = None
    run: Callable[..., None] | None = None
    whole: Callable[[int], Fetch] | None = None
    listeners: Sequence[LayerListener] = ()
    plan: StepPlan | None = None
    streams: dict[int, torch.Tensor] = field(default_factory=dict)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """What `run` has left."""
        if self.left is not None:
            return *self.streams.values(), *self.left
        made = (self.hidden, self.logits)
        return *self.streams.values(), *(tensor for tensor in made if tensor is not None)

    def replace(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Let others stand in the place of `outputs`."""
        others = outputs[len(self.streams) :]
        self.streams = dict(zip(self.streams, outputs, strict=False))
        if self.left is not None:
            self.left = others
        elif self.logits is None:
            (self.hidden,) = others
        else:
            self.hidden = others[0]
            self.logits = others[1]


class Drawing(NamedTuple):
    """Where a step draws, on the host: at n positions, each sampling row's last token and those that drafts follow.

    Args:
        slot, num_tokens: int32 [n]; as `SampledRows` has them.
        row: int64 [n]; of the plan. place: int [n]; which of its row's tokens draws.
        starts: int64 [R]; each row's first token where rows are not padded; None where each has one.
    """

    slot: np.ndarray
    num_tokens: np.ndarray
    row: np.ndarray
    place: np.ndarray
    starts: np.ndarray | None

    @classmethod
    def of(cls, plan: StepPlan, rows: np.ndarray) -> Drawing:
        """Where these rows of a plan draw, int64 [m], with the drafts that were found."""
        row, ahead = rows, np.zeros_like(rows)
        if plan.num_drafts is not None:
            counts = 1 + plan.num_drafts[rows]
            row = np.repeat(rows, counts)
            ahead = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(row))
        place, starts = plan.num_tokens[row] - 1 - ahead, None
        if plan.num_decodes < plan.num_rows:
            starts = np.cumsum(plan.num_tokens, dtype=np.int64) - plan.num_tokens
        num_tokens = (plan.num_computed[row] + 1 + place).astype(np.int32)
        return cls(plan.slot_of_row[row], num_tokens, row, place, starts)

    def select(self, tokens_per_row: int) -> np.ndarray | None:
        """int64 [n]; the tokens that draw; None where each row's one token does."""
        if tokens_per_row == 1:
            return None
        assert self.starts is not None
        return (self.row * tokens_per_row if tokens_per_row else self.starts[self.row]) + self.place


class LaunchedStep(NamedTuple):
    """Implements `engine.interfaces.step.TargetStep`.

    Args:
        plan, hidden, streams: as there.
        frame: the inputs.
        counts: int32 [m], device; of each row that draws, how many of its draws count; None where the plan has no
            drafts.
        ends: int64 [m], device; where drafts branch, the tokens with which the paths of these rows end.
        slots, platform: the worker's.
    """

    plan: StepPlan
    hidden: torch.Tensor | None
    streams: Mapping[int, torch.Tensor]
    frame: StepInputBuffers
    counts: torch.Tensor | None
    ends: torch.Tensor | None
    slots: SlotTables
    platform: Platform

    @property
    def query_start_loc(self) -> torch.Tensor:
        return self.frame.inputs.query_start_loc

    @property
    def next_tokens(self) -> torch.Tensor:
        """Read from the table, where the draws stand by now."""
        plan, frame, tokens = self.plan, self.frame, self.slots.tables.tokens
        slot = np.full(frame.num_tokens, self.slots.scratch_slot, np.int64)
        slots = np.repeat(plan.slot_of_row, frame.tokens_per_row or plan.num_tokens)
        slot[: len(slots)] = slots
        place = (frame.inputs.positions + 1).clamp_(max=tokens.shape[1] - 1)
        return tokens[send(self.platform, slot)[0], place]

    @property
    def kept(self) -> torch.Tensor:
        """All of a row's tokens, but for its drafts those that count."""
        plan = self.plan
        if plan.num_drafts is None or self.counts is None:
            return send(self.platform, plan.num_tokens)[0]
        rows = np.flatnonzero(plan.samples)
        kept, places = send(self.platform, plan.num_tokens - plan.num_drafts - plan.samples.astype(np.int32), rows)
        return kept.index_add_(0, places, self.counts)

    @property
    def last(self) -> torch.Tensor:
        last = self.query_start_loc[: self.plan.num_rows].long() + self.kept - 1
        if self.ends is None:
            return last
        return last.index_copy_(0, send(self.platform, np.flatnonzero(self.plan.samples))[0], self.ends)
