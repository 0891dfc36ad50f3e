"""The body of driver `flashinfer` over the double of its library."""

from __future__ import annotations

import torch
from flashinfer_double import BatchPrefillWithPagedKVCacheWrapper

from engine.interfaces.attention import AttentionLayer, LayerCache
from engine.interfaces.context import WorkerContext
from engine_flashinfer.body import FlashInferBody
from engine_flashinfer.plan import FlashInferPlan
from engine_flashinfer.staging import Staging
from engine_flashinfer.wrappers import Wrappers


class Done:
    """An event that the device has passed."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


class DoubleBody(FlashInferBody):
    """Writes as `write_reference` has them, which takes a hundredth of the interpreter's time."""

    def wrappers(self, context: WorkerContext, workspace_bytes: int) -> Wrappers:
        workspace = torch.zeros(16, dtype=torch.uint8)
        staging = Staging(lambda: torch.empty(16, dtype=torch.uint8), Done)
        return Wrappers(BatchPrefillWithPagedKVCacheWrapper, workspace, staging)

    def write(
        self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: FlashInferPlan
    ) -> None:
        write_reference(k, v, cache.k, cache.v, plan.slot_mapping)


def write_reference(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """What `engine_flashinfer.write.write_pages` does, in torch."""
    fp8 = k_pages.dtype.itemsize == 1
    if fp8:
        k, v = (x.clamp(-448, 448) for x in (k, v))
    finite = v.isfinite()
    k, v = torch.where(finite.all(dim=-1, keepdim=True), k, torch.nan), torch.where(finite, v, 0)
    where = (slots // k_pages.shape[1], slots % k_pages.shape[1])
    for new, pages in ((k, k_pages), (v, v_pages)):
        if fp8:
            pages.view(torch.uint8).index_put_(where, new.to(pages.dtype).view(torch.uint8))
        else:
            pages.index_put_(where, new)
