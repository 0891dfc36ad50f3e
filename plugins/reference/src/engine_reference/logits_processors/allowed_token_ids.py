"""Everything but the allowed tokens is masked, by a row of flags for each slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_reference.logits_processors.tables import sent

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.logits_processor import LogitsRows
    from engine.types.plan import NewSlot


class AllowedTokenIdsBody:
    """See `engine.interfaces.logits_processor.LogitsProcessor`. A byte an id and slot, from first use."""

    def __init__(self, context: WorkerContext) -> None:
        assert context.device is not None
        self._shape = context.start.max_num_seqs, context.start.model.vocab_size
        self._context = context
        self._forbidden: torch.Tensor | None = None

    def enter(self, new: NewSlot) -> None:
        """See the interface."""
        if self._forbidden is None:
            self._forbidden = torch.zeros(self._shape, dtype=torch.bool, device=self._context.device)
        forbidden = np.ones(self._shape[1], np.bool_)
        forbidden[np.array(new.params.allowed_token_ids, np.int64)] = False
        self._forbidden[new.slot] = sent(self._context, forbidden)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """See the interface."""
        assert self._forbidden is not None
        forbidden = self._forbidden[rows.slot]
        if rows.row is None:
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            logits[rows.row] = logits[rows.row].masked_fill_(forbidden, -torch.inf)
