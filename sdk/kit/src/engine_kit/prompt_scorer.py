"""Log probabilities of prompt tokens, from the hidden states of the chunks that compute them.

The logits of a chunk would be as large as the whole vocabulary for each of its tokens, so they are made and used up in
pieces of `PIECE` tokens. Nothing is kept from one step to the next.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from engine.interfaces.adapter import AdapterWorker
from engine.interfaces.model import Model
from engine.interfaces.ops import Ops
from engine.interfaces.platform import Platform
from engine.interfaces.step import StepOutput, StepPart, TargetStep
from engine.types.plan import NewSlot, PromptLogprobRows, StepPlan, StepResult
from engine_kit.token_types import positions_of

PIECE = 128
"""Tokens whose logits are in memory at once."""


class PromptScorer(StepPart):
    """Scores prompt tokens of the slots that asked for it.

    Args:
        ops, platform, model: the worker's.
        tokens: int32 [max_num_seqs + 1, max_model_len + 1]; the device's table of tokens.
        adapters: of heads; None where there are none.
    """

    def __init__(
        self,
        ops: Ops,
        platform: Platform,
        model: Model,
        tokens: torch.Tensor,
        vocab_size: int,
        adapters: AdapterWorker | None = None,
    ) -> None:
        self._ops = ops
        self._platform = platform
        self._model = model
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._adapted: Any = nullcontext if adapters is None else adapters.at
        self._asked = np.full(tokens.shape[0], -1, np.int32)
        self._num_prompt = np.zeros(tokens.shape[0], np.int32)
        self._used = False

    def enter(self, new: NewSlot) -> None:
        asked = new.params.prompt_logprobs
        if asked is None and not self._used:
            return
        self._asked[new.slot] = -1 if asked is None else min(asked, self._vocab_size)
        self._num_prompt[new.slot] = new.num_prompt_tokens
        self._used = bool((self._asked >= 0).any())

    def steady(self) -> bool:
        """No slot asks."""
        return not self._used

    def launched(self, step: TargetStep) -> StepOutput | None:
        """The scores of the step's prompt tokens that are asked for."""
        plan, hidden = step.plan, step.hidden
        wanted = self._wanted(plan)
        if wanted is None or hidden is None:
            return None
        index = np.flatnonzero(wanted)
        row = np.repeat(np.arange(plan.num_rows), plan.num_tokens)[index].astype(np.int32)
        position = positions_of(plan)[index].astype(np.int32) + 1
        k = int(self._asked[plan.slot_of_row[row]].max())
        host = torch.from_numpy(np.stack((index, plan.slot_of_row[row], position)).astype(np.int64))
        places = torch.empty(host.shape, dtype=host.dtype, device=self._tokens.device)
        self._platform.to_device(host, places)
        token, slot, place = places
        ids = self._tokens[slot, place]
        pieces = []
        for first in range(0, len(index), PIECE):
            with self._adapted(index[first : first + PIECE]):
                logits = self._model.logits(self._ops.gather_rows(hidden, token[first : first + PIECE]))
            if logits.dtype not in (torch.float32, torch.float64):
                logits = logits.float()
            pieces.append(self._ops.logprobs(logits, ids[first : first + PIECE], k))

        def put(result: StepResult, arrays: list[np.ndarray]) -> None:
            chosen, rank, top_ids, top_values = arrays
            result.prompt_logprobs = PromptLogprobRows(
                row=row, position=position, chosen=chosen, rank=rank, top_ids=top_ids, top_values=top_values
            )

        return StepOutput(tuple(torch.cat(column) for column in zip(*pieces, strict=True)), put)

    def _wanted(self, plan: StepPlan) -> np.ndarray | None:
        """bool [T]; the tokens of the step whose successor is a prompt token that is asked for; None for none."""
        slots = plan.slot_of_row
        rows = (self._asked[slots] >= 0) & (plan.num_computed + 1 < self._num_prompt[slots])
        if not rows.any():
            return None
        ends = np.repeat(self._num_prompt[slots], plan.num_tokens)
        return np.repeat(rows, plan.num_tokens) & (positions_of(plan) + 1 < ends)
