"""The body of the attention in Triton: tensors to launches.

A page of a layer holds, for each KV head, its keys and then its values, [tokens_per_block, head_size] each: what a
program reads of a page is one run of bytes, whole lines of memory where a head has 64 elements or more.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from engine.interfaces.attention import (
    AttentionBatch,
    AttentionLayer,
    AttentionNeed,
    CaptureLevel,
    LayerCache,
    Rotation,
)
from engine.types.kv import KVGroup
from engine_cuda.attention_triton.kernel import LOG2E, Form, attention_kernel
from engine_cuda.attention_triton.plan import Division, TritonPlan, WorkList
from engine_cuda.attention_triton.tiles import Target, decode_tiles, prefill_tiles, target_of
from engine_cuda.attention_triton.write import store, store_rotated
from engine_cuda.dependents import depends
from engine_cuda.interpreter import interpreted
from engine_cuda.interpreter_shim import PROCESSORS, widens, written_for

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cuda.attention_triton.card import TritonAttentionOptions


class _Scratch(NamedTuple):
    """Where chunks of one unit leave their results for the last of them. Steps of a worker follow one another, and so
    do its layers: all of them share it.

    Args:
        partial: float32 [slots, heads, BLOCK_M, BLOCK_D].
        sums: float32 [slots, heads, 2, BLOCK_M]; largest scores, and sums of exponentials.
        counters: int32 [slots, heads]; zeros, and zeros again when all programs are done.
    """

    partial: torch.Tensor
    sums: torch.Tensor
    counters: torch.Tensor


class TritonAttentionBody:
    """See `engine.interfaces.attention.AttentionBackend`.

    A captured step stays right for any lengths, pages and places, and for any rows where its batch says `any_rows`.
    Else it has to keep its kinds of rows, as all steps with the same number of tokens in every row do: up to as many
    tokens as a short unit has, or more.
    """

    capture_level: CaptureLevel = "any"
    plans_by_launches = True

    def __init__(self, context: WorkerContext) -> None:
        options: TritonAttentionOptions = context.options
        device, dtype = context.device, context.dtype
        assert device is not None and dtype is not None
        self._dtype = dtype
        self._interpreted = interpreted()
        self._target: Target = "interpreter"
        processors = PROCESSORS
        if not self._interpreted:
            facts = torch.cuda.get_device_properties(device)
            capability = None if torch.version.hip else (facts.major, facts.minor)
            self._target = target_of(capability)
            processors = facts.multi_processor_count
        self._processors = processors if options.split_kv else 0
        self._dependent = depends(context)
        self._needs: dict[KVGroup, AttentionNeed] = {}
        self._scratch: dict[tuple[int, ...], _Scratch] = {}

    # -- the cache ---------------------------------------------------------------------------------------------------
    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> LayerCache:
        """Views [num_pages, num_kv_heads, tokens_per_block, head_size] of uint8 pages [num_pages, layer_bytes]."""
        self._needs[group] = need
        dtype: torch.dtype = getattr(torch, need.kv_dtype)
        shape = (group.num_kv_heads, 2, group.tokens_per_block, group.head_size)
        elements = shape[0] * shape[1] * shape[2] * shape[3]
        both = pages[:, : elements * dtype.itemsize].view(dtype).unflatten(1, shape)
        return LayerCache(both[:, :, 0], both[:, :, 1])

    def write(
        self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: TritonPlan
    ) -> None:
        """Store k, v [T, num_kv_heads, head_size], rounded to the cache's type where that is narrower.

        What fp8 cannot hold becomes its largest number.
        """
        store(k, v, cache, plan.batch.slot_mapping, self._interpreted, self._dependent)

    def write_rotated(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        cache: LayerCache,
        plan: TritonPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.attention.AttentionBackend.write_rotated`. Rotates q in place; keys are read from the
        cache alone, and stay as they are where they were given."""
        return store_rotated(q, k, v, rotation, cache, plan.batch.slot_mapping, self._dependent), k

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.attention.AttentionBackend.read`."""
        where = (slots // group.tokens_per_block, slice(None), slots % group.tokens_per_block)
        return cache.k[where], cache.v[where]

    def move(self, group: KVGroup, cache: LayerCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        """See `engine.interfaces.attention.AttentionBackend.move`."""
        where = (destination // group.tokens_per_block, slice(None), destination % group.tokens_per_block)
        cache.k[where], cache.v[where] = self.read(group, cache, source)

    # -- plans -------------------------------------------------------------------------------------------------------
    def plan(self, batch: AttentionBatch, group: KVGroup, out: TritonPlan | None = None) -> TritonPlan:
        """The step's division into programs, made on the device."""
        plan = TritonPlan(batch, group, self._division(group)) if out is None else out
        plan.fill(batch)
        return plan

    def _division(self, group: KVGroup) -> Division:
        """What is known of a group before its layers are."""
        need = self._needs.get(group)
        if need is None:  # a layer that keeps nothing
            ratio, kv_bytes, more = group.num_q_heads // group.num_kv_heads, self._dtype.itemsize, False
        else:
            ratio = need.num_q_heads // need.num_kv_heads
            kv_bytes = getattr(torch, need.kv_dtype).itemsize
            more = bool(need.sliding_window or need.soft_cap or "alibi" in need.features)
        return _division(
            ratio,
            group.num_kv_heads,
            group.head_size,
            self._dtype.itemsize,
            kv_bytes,
            more,
            self._target,
            self._processors,
        )

    # -- attention ---------------------------------------------------------------------------------------------------
    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        plan: TritonPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `engine.interfaces.attention.AttentionBackend.forward`."""
        keys, values = (cache.k, cache.v) if plan.cached else (k, v)
        if q.stride(-1) != 1:
            q = q.contiguous()
        if not plan.cached and (k.stride(-1) != 1 or v.stride(-1) != 1):
            keys, values = k.contiguous(), v.contiguous()
        result = written_for(out, self._interpreted)
        for work in plan.lists:
            self._launch(layer, q, keys, values, plan, work, result, lse)
        if result is not out:
            out.copy_(result)

    def _launch(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: TritonPlan,
        work: WorkList,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        batch, group, cap = plan.batch, layer.group, layer.need.soft_cap
        size, kv_heads = group.head_size, group.num_kv_heads
        group_size = layer.need.num_q_heads // kv_heads
        packed = min(group_size, max(1, work.tiles.most_rows // work.queries))
        rows = max(16, triton.next_power_of_2(work.queries * packed))
        heads = kv_heads * triton.cdiv(group_size, packed)
        width = _width(size)
        scratch = self._scratch_of(work.slots, heads, rows, width, q.device)
        scale = layer.scale * LOG2E if cap is None else layer.scale / cap * 2 * LOG2E
        if plan.cached:
            assert k.stride() == v.stride()
            page, head, token, _ = k.stride()
            kv_strides = (page, token, token, head, head)
        else:
            kv_strides = (0, k.stride(0), v.stride(0), k.stride(1), v.stride(1))
        form = Form(
            KV_HEADS=kv_heads,
            GROUP=group_size,
            PACKED=packed,
            HEAD_SIZE=size,
            BLOCK_D=width,
            PAGE=group.tokens_per_block,
            BLOCK_M=rows,
            BLOCK_N=work.tiles.keys,
            ONE=plan.one_each,
            SHORT=not work.is_long,
            CACHED=plan.cached,
            WINDOW=plan.cached and group.sliding_window is not None,
            CAP=cap is not None,
            SINKS=layer.sinks is not None,
            ALIBI=layer.alibi_slopes is not None,
            LSE=lse is not None,
            TREE=plan.cached and batch.hidden is not None,
            FUSED=cap is None and layer.alibi_slopes is None and layer.scale > 0,
            WIDEN=widens(q.dtype, self._interpreted),
            DEPENDENT=bool(self._dependent),
        )
        attention_kernel[(work.bound * heads,)](
            out,
            lse,
            q,
            (k, v),
            (batch.block_table, work.items, batch.kv_index, batch.hidden),
            tuple(scratch),
            layer.sinks,
            layer.alibi_slopes,
            (scale, 0.0 if cap is None else cap * LOG2E, group.sliding_window or 0),
            out.stride()[:2],
            (0, 0) if lse is None else lse.stride(),
            q.stride()[:2],
            kv_strides,
            batch.block_table.stride(0),
            FORM=form,
            num_warps=work.tiles.warps,
            num_stages=work.tiles.stages,
            **self._dependent,
        )

    def _scratch_of(self, slots: int, heads: int, rows: int, width: int, device: torch.device) -> _Scratch:
        """Room for partial results, allocated at the first step of its form: before anything of it is captured."""
        key = (slots, heads, rows, width)
        found = self._scratch.get(key)
        if found is None:
            found = self._scratch[key] = _Scratch(
                torch.empty(slots * heads * rows * width, dtype=torch.float32, device=device),
                torch.empty(slots * heads * 2 * rows, dtype=torch.float32, device=device),
                torch.zeros(slots * heads, dtype=torch.int32, device=device),
            )
        return found


@functools.cache
def _division(
    ratio: int,
    kv_heads: int,
    head_size: int,
    dtype_bytes: int,
    kv_bytes: int,
    more: bool,
    target: Target,
    processors: int,
) -> Division:
    """processors: multiprocessors; 0: keys are not divided."""
    width = _width(head_size)
    short = decode_tiles(width, dtype_bytes, kv_bytes, target)
    long = prefill_tiles(width, dtype_bytes, kv_bytes, target, more)
    wave_short, wave_long = (triton.cdiv(processors * tiles.per_processor, kv_heads) for tiles in (short, long))
    return Division(short, long, ratio, wave_short, wave_long)


def _width(size: int) -> int:
    """A head's elements, up to a power of two; products take 16 at least."""
    return max(16, triton.next_power_of_2(size))
