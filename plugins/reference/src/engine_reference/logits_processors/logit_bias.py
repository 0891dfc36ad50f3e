"""Biases are added, from a table of ids and values for each slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_reference.logits_processors.tables import sent, widened

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.logits_processor import LogitsRows
    from engine.types.plan import NewSlot


class LogitBiasBody:
    """See `engine.interfaces.logits_processor.LogitsProcessor`. Values are float32; padding adds 0 to id 0."""

    def __init__(self, context: WorkerContext) -> None:
        assert context.device is not None
        self._context = context
        slots = context.start.max_num_seqs
        self._ids = torch.zeros(slots, 0, dtype=torch.int64, device=context.device)
        self._values = torch.zeros(slots, 0, dtype=torch.float32, device=context.device)

    def enter(self, new: NewSlot) -> None:
        """See the interface."""
        bias = new.params.logit_bias
        assert bias is not None
        self._ids = widened(self._ids, (len(bias),), 0)
        self._values = widened(self._values, (len(bias),), 0)
        self._ids[new.slot], self._values[new.slot] = 0, 0
        self._ids[new.slot, : len(bias)] = sent(self._context, np.array(list(bias), np.int64))
        self._values[new.slot, : len(bias)] = sent(self._context, np.array(list(bias.values()), np.float32))

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """See the interface. An id stands once in a slot's table, but for padding: the sum has one order."""
        row = torch.arange(len(logits), device=logits.device) if rows.row is None else rows.row
        values = self._values[rows.slot].to(logits.dtype)
        logits.index_put_((row.unsqueeze(1), self._ids[rows.slot]), values, accumulate=True)
