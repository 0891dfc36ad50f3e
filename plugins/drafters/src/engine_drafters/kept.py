"""What a drafter keeps of each request between steps: a vector by slot, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class KeptBySlot:
    """[max_num_seqs, size], in the target's dtype.

    A slot that was entered holds zeros: where a request's pages come from elsewhere, drafts may be wanted before a step
    of it was seen, and they are to follow from that request alone.
    """

    def __init__(self, context: WorkerContext, size: int) -> None:
        assert context.platform is not None
        self._platform = context.platform
        shape = (context.start.max_num_seqs, size)
        self._rows = torch.zeros(shape, dtype=context.dtype, device=context.device)

    def enter(self, slot: int) -> None:
        """Somebody else's now."""
        self._rows[slot] = 0

    def put(self, slot: np.ndarray, rows: torch.Tensor) -> None:
        """slot int32 [m], host; rows [m, size]."""
        self._rows[self._sent(slot)] = rows.to(self._rows.dtype)

    def get(self, slot: np.ndarray) -> torch.Tensor:
        """slot int32 [m], host -> a new tensor [m, size]."""
        return self._rows[self._sent(slot)]

    def _sent(self, slot: np.ndarray) -> torch.Tensor:
        there = torch.empty(len(slot), dtype=torch.int64, device=self._rows.device)
        self._platform.to_device(torch.from_numpy(slot.astype(np.int64)), there)
        return there
