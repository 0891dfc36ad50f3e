"""Log probabilities of prompt tokens, from the hidden states of the chunks that compute them.

The logits of a chunk would be as large as the whole vocabulary for each of its tokens, so they are made and used up in
pieces of `PIECE` tokens. Nothing is kept from one step to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.interfaces.model import Model
from engine.interfaces.ops import Ops
from engine.interfaces.platform import Platform
from engine.types.plan import NewSlot, PromptLogprobRows, StepPlan

PIECE = 128
"""Tokens whose logits are in memory at once."""


class ScoredPrompts(NamedTuple):
    """The log probabilities of m prompt tokens, on their way to the host.

    Args:
        row, position: int32 numpy [m].
        tensors: what `Ops.logprobs` gives, [m] and [m, k].
    """

    row: np.ndarray
    position: np.ndarray
    tensors: tuple[torch.Tensor, ...]

    def rows(self, fetched: list[np.ndarray]) -> PromptLogprobRows:
        """The same with the tensors' values, as the step's result holds them."""
        chosen, rank, top_ids, top_values = fetched
        return PromptLogprobRows(
            row=self.row, position=self.position, chosen=chosen, rank=rank, top_ids=top_ids, top_values=top_values
        )


class PromptScorer:
    """Scores prompt tokens of the slots that asked for it.

    Args:
        ops, platform, model: the worker's.
        tokens: int32 [max_num_seqs + 1, max_model_len + 1]; the device's table of tokens.
    """

    def __init__(self, ops: Ops, platform: Platform, model: Model, tokens: torch.Tensor, vocab_size: int) -> None:
        self._ops = ops
        self._platform = platform
        self._model = model
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._asked = np.full(tokens.shape[0], -1, np.int32)
        self._num_prompt = np.zeros(tokens.shape[0], np.int32)
        self._used = False

    def enter(self, new: NewSlot) -> None:
        """A request enters a slot."""
        asked = new.params.prompt_logprobs
        if asked is None and not self._used:
            return
        self._asked[new.slot] = -1 if asked is None else min(asked, self._vocab_size)
        self._num_prompt[new.slot] = new.num_prompt_tokens
        self._used = bool((self._asked >= 0).any())

    def wanted(self, plan: StepPlan) -> np.ndarray | None:
        """bool [T]; the tokens of the step whose successor is a prompt token that is asked for; None for none."""
        if not self._used:
            return None
        slots = plan.slot_of_row
        rows = (self._asked[slots] >= 0) & (plan.num_computed + 1 < self._num_prompt[slots])
        if not rows.any():
            return None
        return np.repeat(rows, plan.num_tokens) & (self._positions(plan) + 1 < self._of_token(self._num_prompt, plan))

    def score(self, hidden: torch.Tensor, plan: StepPlan, wanted: np.ndarray) -> ScoredPrompts:
        """Score them.

        Args:
            hidden: [T, H]; of the step's tokens.
            plan: of the step.
            wanted: as `wanted` gave it, with at least one True.
        """
        index = np.flatnonzero(wanted)
        row = np.repeat(np.arange(plan.num_rows), plan.num_tokens)[index].astype(np.int32)
        position = self._positions(plan)[index].astype(np.int32) + 1
        k = int(self._asked[plan.slot_of_row[row]].max())
        token, slot, place = (
            self._to_device(array.astype(np.int64)) for array in (index, plan.slot_of_row[row], position)
        )
        ids = self._tokens[slot, place]
        pieces = []
        for first in range(0, len(index), PIECE):
            logits = self._model.logits(self._ops.gather_rows(hidden, token[first : first + PIECE]))
            if logits.dtype not in (torch.float32, torch.float64):
                logits = logits.float()
            pieces.append(self._ops.logprobs(logits, ids[first : first + PIECE], k))
        tensors = tuple(torch.cat(column) for column in zip(*pieces, strict=True))
        return ScoredPrompts(row, position, tensors)

    @staticmethod
    def _positions(plan: StepPlan) -> np.ndarray:
        """int64 [T]; of the step's tokens in their sequences."""
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        return np.arange(plan.total_tokens) + np.repeat(plan.num_computed - starts, plan.num_tokens)

    @staticmethod
    def _of_token(of_slot: np.ndarray, plan: StepPlan) -> np.ndarray:
        return np.repeat(of_slot[plan.slot_of_row], plan.num_tokens)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        out = torch.empty(array.shape, dtype=torch.int64, device=self._platform.device)
        self._platform.to_device(torch.from_numpy(array), out)
        return out
