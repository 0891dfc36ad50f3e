"""The body of the latent attention in Triton: tensors to launches.

A page of a layer holds its tokens' vectors one after another, [tokens_per_block, C + P]: the latent, then the rotated
key. 1152 bytes a vector of 16 bits with DeepSeek's sizes, nine whole lines of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel
from engine.types.kv import KVGroup
from engine_cuda.attention_mla.kernels import join_kernel, latent_attention_kernel, write_kernel
from engine_cuda.attention_mla.plan import LEAST_SPLIT, Launch, MLAPlan, launches_of
from engine_cuda.attention_mla.tiles import Target, target_of
from engine_cuda.interpreter import interpreted
from engine_cuda.interpreter_shim import PROCESSORS, rounded, widens, written_for

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

LOG2E = 1.4426950408889634
WRITTEN = 4
"""Tokens that one program writes to the cache."""
JOINED = 128
"""Columns of a mean that one program joins."""


class TritonLatentAttentionBody:
    """See `engine.interfaces.latent_attention.LatentAttentionBackend`.

    A captured step stays right for any lengths, pages and places; every row has to keep its number of tokens.
    """

    capture_level: CaptureLevel = "uniform"
    plans_by_launches = True
    """A refill for rows of one token each changes nothing: lengths and tables are read on the device."""

    def __init__(self, context: WorkerContext) -> None:
        device, dtype = context.device, context.dtype
        assert device is not None and dtype is not None
        self._device = device
        self._dtype = dtype
        self._interpreted = interpreted()
        self._target: Target = "interpreter"
        self._processors = PROCESSORS
        self._partial: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        if not self._interpreted:
            facts = torch.cuda.get_device_properties(device)
            capability = None if torch.version.hip else (facts.major, facts.minor)
            self._target = target_of(capability)
            self._processors = facts.multi_processor_count

    # -- the cache ---------------------------------------------------------------------------------------------------
    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> torch.Tensor:
        """A view [num_pages, tokens_per_block, C + P] of uint8 pages [num_pages, layer_bytes]."""
        dtype: torch.dtype = getattr(torch, need.kv_dtype)
        elements = group.tokens_per_block * group.head_size
        return pages[:, : elements * dtype.itemsize].view(dtype).unflatten(1, (group.tokens_per_block, -1))

    def write(
        self, layer: AttentionLayer, latent: torch.Tensor, rope_key: torch.Tensor, cache: torch.Tensor, plan: MLAPlan
    ) -> None:
        """Store latent [T, C] and rope_key [T, P], rounded to the cache's type where that is narrower.

        What fp8 cannot hold becomes its largest number.
        """
        latent, rope_key = _dense_inside(latent), _dense_inside(rope_key)
        if self._interpreted:
            latent, rope_key = (rounded(x, cache.dtype) for x in (latent, rope_key))
        tokens, (c, p) = len(latent), (latent.shape[1], rope_key.shape[1])
        write_kernel[(triton.cdiv(tokens, WRITTEN),)](
            (latent, rope_key), cache, plan.batch.slot_mapping, tokens, (latent.stride(0), rope_key.stride(0)),
            cache.stride()[:2], C=c, P=p, BLOCK_C=_width(c), BLOCK_P=_width(p), PAGE=layer.group.tokens_per_block,
            BLOCK_T=WRITTEN, num_warps=4,
        )  # fmt: skip

    def read(self, group: KVGroup, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.latent_attention.LatentAttentionBackend.read`."""
        vectors = cache[slots // group.tokens_per_block, slots % group.tokens_per_block]
        return vectors[:, : -group.rope_size], vectors[:, -group.rope_size :]

    # -- plans -------------------------------------------------------------------------------------------------------
    def plan(self, batch: AttentionBatch, group: KVGroup, out: MLAPlan | None = None) -> MLAPlan:
        """The step's launches. The kernels read the batch's own tensors."""
        num_tokens = int(batch.query_start_loc_host[batch.num_rows])
        if out is None:
            kv_bytes = group.layer_bytes // (group.tokens_per_block * group.head_size)
            launches = launches_of(
                batch, group.num_q_heads, self._dtype.itemsize, kv_bytes, self._target, self._processors
            )
            for launch in launches:
                if launch.splits > 1:
                    self._partials(launch, _width(group.head_size - group.rope_size))
            return MLAPlan(batch, launches, num_tokens)
        out.batch = batch
        out.num_tokens = num_tokens
        return out

    def _partials(self, launch: Launch, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the means of parts and the logarithms of their sums: as much as any divided launch needs, which is
        at most a tile for each program that the GPU runs at once. Launches follow one another, so all share it."""
        form = launch.tiles.queries, width
        if form not in self._partial:
            rows = launch.tiles.per_processor * self._processors * launch.tiles.queries
            partial = torch.empty((rows, width), dtype=torch.float32, device=self._device)
            self._partial[form] = partial, torch.empty(rows, dtype=torch.float32, device=self._device)
        return self._partial[form]

    # -- attention ---------------------------------------------------------------------------------------------------
    def forward(
        self,
        layer: AttentionLayer,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        cache: torch.Tensor,
        plan: MLAPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `engine.interfaces.latent_attention.LatentAttentionBackend.forward`."""
        q_latent, q_rope = _dense_inside(q_latent), _dense_inside(q_rope)
        result = written_for(out, self._interpreted)
        if plan.num_tokens < len(out):
            result[plan.num_tokens :].zero_()
            if lse is not None:
                lse[plan.num_tokens :].zero_()
        for launch in plan.launches:
            self._launch(layer, q_latent, q_rope, cache, plan, launch, result, lse)
        if result is not out:
            out.copy_(result)

    def _launch(
        self,
        layer: AttentionLayer,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        cache: torch.Tensor,
        plan: MLAPlan,
        launch: Launch,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        batch, tiles, heads = plan.batch, launch.tiles, q_latent.shape[1]
        c, p = q_latent.shape[2], q_rope.shape[2]
        width, divided = _width(c), launch.splits > 1
        partial = self._partials(launch, width) if divided else (out, out)
        lse_strides = (0, 0) if lse is None else lse.stride()
        sums = out if lse is None else lse
        form = {
            "C": c, "BLOCK_C": width, "BLOCK_M": tiles.queries, "BLOCK_N": tiles.vectors, "LEAST": LEAST_SPLIT,
            "RAGGED": launch.ragged, "LSE": lse is not None,
        }  # fmt: skip
        rows = (launch.first_row, launch.num_rows, heads, launch.splits)
        out_strides = out.stride()[:2]
        latent_attention_kernel[(launch.blocks, launch.splits)](
            (q_latent, q_rope), cache,
            (batch.block_table, batch.query_start_loc, batch.kv_index), out, sums, partial,
            layer.scale * LOG2E, *rows, q_latent.stride()[:2] + q_rope.stride()[:2], cache.stride()[:2],
            batch.block_table.stride(0), out_strides, lse_strides, P=p, BLOCK_P=_width(p),
            PAGE=layer.group.tokens_per_block, SPLIT=divided,
            WIDEN=widens(q_latent.dtype, self._interpreted), **form,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if not divided:
            return
        columns = min(JOINED, width)
        join_kernel[(launch.blocks, tiles.queries, width // columns)](
            (batch.query_start_loc, batch.kv_index), out, sums, partial, *rows, out_strides,
            lse_strides, SPLITS=triton.next_power_of_2(launch.splits), BLOCK_COLUMNS=columns, **form, num_warps=1,
        )  # fmt: skip


def _dense_inside(x: torch.Tensor) -> torch.Tensor:
    """With neighbouring elements in the last dimension; others may have any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _width(size: int) -> int:
    """Elements, up to a power of two; products take 16 at least."""
    return int(max(16, triton.next_power_of_2(size)))
