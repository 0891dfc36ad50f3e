"""The body of attention driver `flashinfer`: pages, writes and lengths are its own, plans and kernels FlashInfer's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel, LayerCache
from engine.types.errors import ConfigError
from engine.types.kv import KVGroup
from engine_flashinfer.card import LEAST_CAPABILITY
from engine_flashinfer.plan import FlashInferPlan, Form
from engine_flashinfer.sinks import apply_sinks
from engine_flashinfer.staging import Staging
from engine_flashinfer.wrappers import LARGE_PLAN, Wrappers, load
from engine_flashinfer.write import write_pages

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_flashinfer.card import FlashInferOptions

ALIGNMENT = 16
"""Bytes that kernels load at once: pages must begin at multiples of it."""


class FlashInferBody:
    """Attention over pages [tokens_per_block, num_kv_heads, head_size] of K, then of V."""

    capture_level: CaptureLevel = "uniform"
    """Plans of rows of equally many queries fill the same buffers each time, and launch as many programs."""

    def __init__(self, context: WorkerContext) -> None:
        options = cast("FlashInferOptions", context.options)
        self._forms: dict[int, Form] = {}
        self._wrappers = self.wrappers(context, options.workspace_mib << 20)

    def wrappers(self, context: WorkerContext, workspace_bytes: int) -> Wrappers:
        """Raises ConfigError where FlashInfer cannot be imported."""
        make = load()
        if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
            raise ConfigError(
                "attention flashinfer",
                "the GPU that is computed on has a compute capability below 8.0",
                "let CUDA_VISIBLE_DEVICES name another GPU, or choose another attention driver",
            )
        assert context.platform is not None
        workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=context.platform.device)
        pinned = partial(torch.empty, LARGE_PLAN, dtype=torch.uint8, pin_memory=True)
        return Wrappers(make, workspace, Staging(pinned))

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> LayerCache:
        """Views [num_pages, tokens_per_block, num_kv_heads, head_size] of uint8 pages [num_pages, layer_bytes]."""
        if pages.stride(0) % ALIGNMENT or pages.data_ptr() % ALIGNMENT:
            raise ConfigError(
                "attention flashinfer",
                f"pages lie {pages.stride(0)} bytes apart, not a multiple of {ALIGNMENT}",
                "choose another attention driver",
            )
        dtype: torch.dtype = getattr(torch, need.kv_dtype)
        shape = (2, group.tokens_per_block, group.num_kv_heads, group.head_size)
        elements = shape[0] * shape[1] * shape[2] * shape[3]
        both = pages[:, : elements * dtype.itemsize].view(dtype).unflatten(1, shape)
        self._forms[group.index] = Form(need=need, group=group)
        return LayerCache(both[:, 0], both[:, 1])

    def plan(self, batch: AttentionBatch, group: KVGroup, out: FlashInferPlan | None = None) -> FlashInferPlan:
        """See `FlashInferPlan`."""
        if out is None:
            return FlashInferPlan.of(batch, self._forms[group.index], self._wrappers)
        out.fill(batch, self._wrappers)
        return out

    def write(
        self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: FlashInferPlan
    ) -> None:
        """Store k, v [T, num_kv_heads, head_size]; see `write_pages`."""
        del layer
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        write_pages(k, v, cache.k, cache.v, plan.slot_mapping)

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.attention.AttentionBackend.read`."""
        where = (slots // group.tokens_per_block, slots % group.tokens_per_block)
        return cache.k[where], cache.v[where]

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        plan: FlashInferPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `engine.interfaces.attention.AttentionBackend.forward`."""
        real = plan.num_tokens
        wrapper, target = plan.wrapper, out[:real]
        wrapper._sm_scale = layer.scale  # a layer's own; plans are made for a group
        queries = q[:real] if q.stride(-1) == 1 else q[:real].contiguous()
        dense = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if lse is None and layer.sinks is None:
            wrapper.run(queries, (cache.k, cache.v), out=dense)
        else:
            _, sums = wrapper.run(queries, (cache.k, cache.v), out=dense, return_lse=True, lse_base="ln")
            if layer.sinks is not None:
                apply_sinks(dense, sums, layer.sinks, None if lse is None else lse[:real])
            elif lse is not None:
                lse[:real].copy_(sums)
        if dense is not target:
            target.copy_(dense)
        if real < len(q):
            out[real:].zero_()
            if lse is not None:
                lse[real:].zero_()
