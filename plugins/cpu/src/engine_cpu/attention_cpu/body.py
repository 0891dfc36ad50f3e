"""The body of the native attention: tensors to addresses. How pages are laid out says native/attention.h."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel, LayerCache
from engine.types.errors import ConfigError
from engine.types.kv import KVGroup
from engine_cpu._native import Attention, PagedCache, levels
from engine_cpu.attention_cpu.card import SCALE_BYTES
from engine_cpu.attention_cpu.plan import CpuPlan
from engine_cpu.dtypes import CACHE_DTYPES, DTYPES

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cpu.attention_cpu.card import CpuAttentionOptions


KEYS = 16
"""Tokens whose keys lie together in a page."""
PAIRS = MappingProxyType({torch.float8_e4m3fn: 2, torch.int8: 2, torch.bfloat16: 2, torch.float32: 1})
"""Elements that dot products take at once: PAIR of native/attention.h."""
WORDS = MappingProxyType({2: torch.int16, 4: torch.int32})
"""By bytes: what such pairs are read as."""


class CpuLayerCache(LayerCache):
    """One layer's views, k and v [num_pages, num_kv_heads, tokens_per_block * head_size], and the kernels' own form; of
    8 bits also the scales of both, bfloat16 [num_pages, num_kv_heads, 2, tokens_per_block]."""

    paged: PagedCache
    scales: torch.Tensor | None = None


class CpuAttentionBody:
    """See `engine.interfaces.attention.AttentionBackend`.

    A row's result has the same bits whatever stands beside it in the batch; with `AttentionNeed.batch_invariant` a
    query's result has the same bits in whatever steps its row is computed, too. Kernels read lengths, tables and slots
    from the batch's own memory when they run, so that what is captured stays right for any step of as many rows and
    tokens.
    """

    capture_level: CaptureLevel = "any"
    plans_by_launches = True

    def __init__(self, context: WorkerContext) -> None:
        options: CpuAttentionOptions = context.options
        if options.level not in ("auto", *levels()):
            raise ConfigError(
                f"attention.level {options.level}",
                "it is not compiled in, or not of this processor",
                f"choose auto or one of {', '.join(levels())}",
            )
        self._level = options.level
        self._threads = torch.get_num_threads()
        self._kernels: dict[tuple[int, int], Attention] = {}

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> CpuLayerCache:
        """Views of uint8 pages [num_pages, layer_bytes]."""
        dtype: torch.dtype = getattr(torch, need.kv_dtype)
        block, size, heads = group.tokens_per_block, group.head_size, group.num_kv_heads
        scales = 2 * SCALE_BYTES * block if dtype.itemsize == 1 else 0
        each = scales + 2 * block * size * dtype.itemsize
        of_heads = pages[:, : heads * each].unflatten(1, (heads, each))
        both = of_heads[:, :, scales:].view(dtype).unflatten(2, (2, block * size))
        cache = CpuLayerCache(both[:, :, 0], both[:, :, 1])
        if scales:
            cache.scales = of_heads[:, :, :scales].view(torch.bfloat16).unflatten(2, (2, block))
        cache.paged = PagedCache(CACHE_DTYPES[dtype], pages.data_ptr(), pages.stride(0), heads, size, block)
        return cache

    def plan(self, batch: AttentionBatch, group: KVGroup, out: CpuPlan | None = None) -> CpuPlan:
        """The addresses that the kernels read at. Rows without a cache are given one for the step."""
        plan = CpuPlan.of(batch, group.kind == "encoder") if out is None else out
        plan.fill(batch)
        return plan

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: CpuPlan) -> None:
        """Store k, v [T, num_kv_heads, head_size], rounded to the cache's type where that is narrower; to 8 bits by the
        largest element of each."""
        assert isinstance(cache, CpuLayerCache)
        self._write(self._kernels_of(layer), k, v, cache.paged, plan.slot_mapping)

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.attention.AttentionBackend.read`."""
        pair, size, block = PAIRS[cache.k.dtype], group.head_size, group.tokens_per_block
        page, offset = slots // block, slots % block
        pairs = cache.k.view(WORDS[pair * cache.k.dtype.itemsize])
        whole = block // KEYS * KEYS  # behind it: a group of fewer tokens
        keys = pairs.new_empty(len(slots), group.num_kv_heads, size // pair)
        for first, end, width in ((0, whole, KEYS), (whole, block, block - whole)):
            if first < end:
                groups = pairs[:, :, first * size // pair : end * size // pair].unflatten(2, (-1, size // pair, width))
                at = (offset - first).clamp(0, end - first - 1)
                found = groups[page, :, at // width, :, at % width]
                keys = torch.where((offset >= first)[:, None, None], found, keys) if first else found
        values = cache.v.unflatten(2, (block // pair, size, pair))[page, :, offset // pair, :, offset % pair]
        found = keys.contiguous().view(cache.k.dtype)
        if getattr(cache, "scales", None) is None:
            return found, values
        assert isinstance(cache, CpuLayerCache) and cache.scales is not None
        scales = cache.scales[page, :, :, offset].float().unsqueeze(-1)
        return found.float() * scales[:, :, 0], values.float() * scales[:, :, 1]

    def move(self, group: KVGroup, cache: LayerCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        """See `engine.interfaces.attention.AttentionBackend.move`."""
        assert isinstance(cache, CpuLayerCache) and source.is_contiguous() and destination.is_contiguous()
        Attention.move(cache.paged, source.data_ptr(), destination.data_ptr(), len(source))

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        plan: CpuPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `engine.interfaces.attention.AttentionBackend.forward`."""
        kernels = self._kernels_of(layer)
        if plan.whole is None:
            assert isinstance(cache, CpuLayerCache)
            paged = cache.paged
        else:
            paged = plan.whole.cache(k)
            self._write(kernels, k, v, paged, plan.slot_mapping)
        if q.stride(-1) != 1:
            q = q.contiguous()
        result = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        sums = lse if lse is None or _dense_float(lse) else torch.empty(lse.shape, dtype=torch.float32)
        sinks, slopes = layer.sinks, layer.alibi_slopes
        more = {"hidden": plan.hidden} if plan.hidden else {}
        if (biases := layer.relative_bias) is not None:
            more |= {"biases": biases.data_ptr(), "span": biases.shape[1] // 2}
        kernels.forward(
            DTYPES[q.dtype], q.data_ptr(), q.stride(0), q.stride(1), result.data_ptr(),
            0 if sums is None else sums.data_ptr(), plan.query_start_loc, plan.block_table, plan.table_stride,
            plan.kv_index, plan.num_rows, plan.num_tokens, paged, layer.scale, layer.need.soft_cap or 0.0,
            layer.group.sliding_window or 0, 0 if sinks is None else sinks.data_ptr(),
            0 if slopes is None else slopes.data_ptr(), **more,
        )  # fmt: skip
        if result is not out:
            out.copy_(result)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)

    def _kernels_of(self, layer: AttentionLayer) -> Attention:
        """The kernels and their memory, one for each form of layer."""
        size, group = layer.group.head_size, layer.need.num_q_heads // layer.need.num_kv_heads
        divides = not layer.need.batch_invariant
        found = self._kernels.get((size, group))
        if found is None:
            found = self._kernels[size, group] = Attention(self._level, self._threads, size, group, divides)
        return found

    @staticmethod
    def _write(kernels: Attention, k: torch.Tensor, v: torch.Tensor, paged: PagedCache, slot_mapping: int) -> None:
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            k, v = k.contiguous(), v.contiguous()
        kernels.write(
            DTYPES[k.dtype], k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1),
            slot_mapping, k.shape[0], paged,
        )  # fmt: skip


def _dense_float(lse: torch.Tensor) -> bool:
    return lse.dtype == torch.float32 and lse.is_contiguous()
