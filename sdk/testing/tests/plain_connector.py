"""A connector whose loads can fail: pages lie in a dictionary, and may get lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.interfaces.kv_connector import KVTransferResult
from engine.process import wire
from engine_reference.connector_host.scheduler_half import Copies

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class Plain:
    """See `engine.interfaces.kv_connector.KVConnectorWorker`; the scheduler half is that of `host`."""

    def __init__(self, context: WorkerContext) -> None:
        self._decode = wire.decoder(Copies).decode
        self._kept: dict[int, torch.Tensor] = {}
        self._failed: dict[int, np.ndarray] = {}

    def lose(self) -> None:
        """All that is kept."""
        self._kept.clear()

    def register(self, pool: torch.Tensor) -> None:
        """The pool."""
        self._pool = pool

    def save(self, metadata: bytes) -> None:
        """Pages out."""
        copies = self._decode(metadata)
        for page, place in zip(copies.out_page.tolist(), copies.out_place.tolist(), strict=True):
            self._kept[place] = self._pool[page].clone()

    def start_load(self, step_id: int, metadata: bytes) -> None:
        """Pages in, as far as they are there."""
        copies, failed = self._decode(metadata), []
        for page, place in zip(copies.in_page.tolist(), copies.in_place.tolist(), strict=True):
            if place in self._kept:
                self._pool[page] = self._kept[place]
            else:
                failed.append(page)
        self._failed[step_id] = np.array(failed, np.int32)

    def step_result(self, step_id: int) -> KVTransferResult:
        """Those that were not."""
        return KVTransferResult(self._failed.pop(step_id))
