"""One launch of the model: what it reads and leaves behind, and which of its tokens draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.runner.buffers import StepInputBuffers
from engine.runner.drafting import StepDrafts
from engine.types.plan import StepPlan


@dataclass(slots=True)
class Step:
    """What a launch of the model reads and leaves behind: `run` is what `platform.capture` gets.

    Args:
        frame: the inputs.
        plans: attention's, one for each group; refilled step after step where the step is captured.
        select: int64 [n]; tokens whose logits are wanted, None for all.
        hidden: [T, H], kept where prompt tokens are to be scored or pooled.
        left: what the next pipeline stage goes on with; None on the last one.
        logits: float32 or float64 [n, V], where `run` leaves them. A replay fills the tensor that the capture left.
        broken: bool [n]; which of their rows hold a NaN.
        run: the launch.
        token_types: int32 [T], for models that have them: a view of a fixed buffer.
    """

    frame: StepInputBuffers
    plans: list[Any]
    select: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    left: tuple[torch.Tensor, ...] | None = None
    logits: torch.Tensor | None = None
    broken: torch.Tensor | None = None
    run: Callable[..., None] | None = None
    token_types: torch.Tensor | None = None

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """What `run` has left."""
        if self.left is not None:
            return self.left
        assert self.hidden is not None and self.logits is not None and self.broken is not None
        return self.hidden, self.logits, self.broken

    def replace(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Let others stand in the place of `outputs`."""
        if self.left is not None:
            self.left = outputs
        else:
            self.hidden, self.logits, self.broken = outputs


class Drawing(NamedTuple):
    """Where a step draws, on the host.

    Args:
        slot, num_tokens: int32 [n]; as `SampledRows` has them.
        row: int64 [n]; of the plan. place: int64 [n]; which of its row's tokens draws.
        starts: int64 [R]; each row's first token where rows are not padded; None where each has one.
    """

    slot: np.ndarray
    num_tokens: np.ndarray
    row: np.ndarray
    place: np.ndarray
    starts: np.ndarray | None

    @classmethod
    def of(cls, plan: StepPlan, rows: np.ndarray, drafts: StepDrafts | None) -> Drawing:
        """rows: int64; those that draw."""
        ends = plan.num_computed + plan.num_tokens
        starts = (
            None if plan.num_decodes == plan.num_rows else np.cumsum(plan.num_tokens, dtype=np.int64) - plan.num_tokens
        )
        if drafts is None:
            return cls(plan.slot_of_row[rows], ends[rows], rows, plan.num_tokens[rows] - 1, starts)
        row, ahead = drafts.positions.row, drafts.positions.ahead
        num_tokens = (ends[row] - ahead).astype(np.int32)
        return cls(plan.slot_of_row[row], num_tokens, row, plan.num_tokens[row] - 1 - ahead, starts)

    def select(self, tokens_per_row: int) -> np.ndarray | None:
        """int64 [n]; the tokens that draw; None where each row's one token does."""
        if tokens_per_row == 1:
            return None
        assert self.starts is not None
        return (self.row * tokens_per_row if tokens_per_row else self.starts[self.row]) + self.place
