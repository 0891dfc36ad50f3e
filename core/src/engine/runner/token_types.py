"""Token types: which text of a pair each token belongs to, for models that have embeddings of them."""

from __future__ import annotations

import numpy as np
import torch

from engine.interfaces.platform import Platform
from engine.types.plan import NewSlot, StepPlan

_NEVER = np.iinfo(np.int32).max


class TokenTypes:
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
        """A request enters a slot."""
        second = None if new.pooling is None else new.pooling.second_text_start
        self._second[new.slot] = _NEVER if second is None else second

    def fill(self, plan: StepPlan, num_tokens: int) -> torch.Tensor:
        """int32 [num_tokens]; of the step's tokens, padding 0. A view of the buffer, which the next step refills."""
        second = np.repeat(self._second[plan.slot_of_row], plan.num_tokens)
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        position = np.arange(plan.total_tokens) + np.repeat(plan.num_computed - starts, plan.num_tokens)
        types = np.zeros(num_tokens, np.int32)
        types[: position.size] = position >= second
        self._platform.to_device(torch.from_numpy(types), self._ids[:num_tokens])
        return self._ids[:num_tokens]
