"""The body of driver `flashinfer` over the double of its library."""

from __future__ import annotations

import torch
from flashinfer_double import BatchPrefillWithPagedKVCacheWrapper

from engine.interfaces.context import WorkerContext
from engine_flashinfer.body import FlashInferBody
from engine_flashinfer.staging import Staging
from engine_flashinfer.wrappers import Wrappers


class Done:
    """An event that the device has passed."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


class DoubleBody(FlashInferBody):
    def wrappers(self, context: WorkerContext, workspace_bytes: int) -> Wrappers:
        workspace = torch.zeros(16, dtype=torch.uint8)
        staging = Staging(lambda: torch.empty(16, dtype=torch.uint8), Done)
        return Wrappers(BatchPrefillWithPagedKVCacheWrapper, workspace, staging)
