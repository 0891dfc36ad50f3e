"""Which of a prompt's two texts each token of a step belongs to, for models that are told (entry-point group
`engine_parts`); and where the tokens of a step stand in their sequences."""

from __future__ import annotations

import numpy as np
import torch

from engine.interfaces.platform import Platform
from engine.interfaces.step import StepPart
from engine.types.plan import NewSlot, StepPlan

_NEVER = np.iinfo(np.int32).max
"""Where the second text starts of a request that has one text."""


class TokenTypes(StepPart):
    """Fills a fixed buffer: 0 for a token of the first text, 1 for one of the second.

    Args:
        platform: the worker's.
        max_num_seqs, max_tokens: slots, and tokens of one step.
    """

    def __init__(self, platform: Platform, max_num_seqs: int, max_tokens: int) -> None:
        self._platform = platform
        self._ids = torch.zeros(max_tokens, dtype=torch.int32, device=platform.device)
        self._second = np.full(max_num_seqs, _NEVER, np.int32)

    def enter(self, new: NewSlot) -> None:
        second = None if new.pooling is None else new.pooling.second_text_start
        self._second[new.slot] = _NEVER if second is None else second

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> dict[str, torch.Tensor]:
        """`token_type_ids` int32 [num_tokens]; padding 0. A view of the buffer, which the next step refills."""
        assert tokens_per_row < 2, "models with token types have no drafts"
        second = np.repeat(self._second[plan.slot_of_row], plan.num_tokens)
        types = np.zeros(num_tokens, np.int32)
        types[: second.size] = positions_of(plan) >= second
        self._platform.to_device(torch.from_numpy(types), self._ids[:num_tokens])
        return {"token_type_ids": self._ids[:num_tokens]}


def positions_of(plan: StepPlan) -> np.ndarray:
    """int64 [T]; of a step's tokens in their sequences."""
    starts = np.cumsum(plan.num_tokens) - plan.num_tokens
    positions: np.ndarray = np.arange(plan.total_tokens) + np.repeat(plan.num_computed - starts, plan.num_tokens)
    return positions
