"""The body of the block-sparse attention in Triton: tensors to launches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import triton

from engine.interfaces.attention import AttentionBatch, AttentionLayer, CaptureLevel, LayerCache
from engine.types.kv import KVGroup
from engine_cuda.attention_block_sparse.kernels import SparseForm, block_sparse_kernel, join_kernel
from engine_cuda.attention_block_sparse.plain import PlainBlockSparse
from engine_cuda.attention_triton.kernel import LOG2E
from engine_cuda.attention_triton.tiles import Target, Tiles, decode_tiles, prefill_tiles, target_of
from engine_cuda.attention_triton.write import store
from engine_cuda.interpreter import interpreted
from engine_cuda.interpreter_shim import PROCESSORS, widens, written_for

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

MOST_SPLITS = 32
"""Programs that share a decode's blocks, at most: one joins them."""


@dataclass(slots=True)
class SparsePlan:
    """What `TritonBlockSparse.plan` makes: the kernels read the batch's own tensors.

    Args:
        batch: the step's.
        units: int32 [n, 3]: row, first token and tokens of each tile of queries of the rows behind the decodes; None
            where there are none.
        num_tokens: of real rows; the tokens after it are padding.
    """

    batch: AttentionBatch
    units: torch.Tensor | None
    num_tokens: int


class TritonBlockSparse(PlainBlockSparse):
    """The same with kernels. A captured step of decodes stays right for any lengths, pages and places."""

    capture_level: CaptureLevel = "decode"

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        assert context.device is not None and context.dtype is not None
        self._dtype = context.dtype
        self._interpreted = interpreted()
        self._target: Target = "interpreter"
        processors = PROCESSORS
        if not self._interpreted:
            facts = torch.cuda.get_device_properties(context.device)
            self._target = target_of(None if torch.version.hip else (facts.major, facts.minor))
            processors = facts.multi_processor_count
        self._processors = processors if context.options.split_kv else 0

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: Any) -> None:
        """Store k, v [T, num_kv_heads, head_size], rounded to the cache's type where that is narrower."""
        store(k, v, cache, plan.batch.slot_mapping, self._interpreted)

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        """The step's tiles of queries, which the host divides; decodes need none."""
        bounds = batch.query_start_loc_host[: batch.num_rows + 1].tolist()
        tiles = self._tiles(group, self._dtype.itemsize, long=True)
        most = max(1, tiles.rows // self._packed(group, tiles))
        units = [
            (batch.num_decodes + row, at, min(most, stop - at))
            for row, (start, stop) in enumerate(pairwise(bounds[batch.num_decodes :]))
            for at in range(start, stop, most)
        ]
        # The last ones come first: they see the most keys, and what takes long has to begin early.
        found = torch.tensor(units[::-1], dtype=torch.int32).to(batch.kv_index.device) if units else None
        if out is None:
            return SparsePlan(batch, found, bounds[-1])
        out.batch = batch
        out.units = found
        out.num_tokens = bounds[-1]
        return out

    def _packed(self, group: KVGroup, tiles: Tiles) -> int:
        """Query heads in one program: all of a KV head where they see the same and find room, else one."""
        return 1 if self._pattern.shifts else min(group.num_q_heads // group.num_kv_heads, tiles.most_rows)

    def _tiles(self, group: KVGroup, kv_bytes: int, *, long: bool) -> Tiles:
        how = prefill_tiles if long else decode_tiles
        return how(_width(group.head_size), self._dtype.itemsize, kv_bytes, self._target)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        plan: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `engine.interfaces.attention.AttentionBackend.forward`."""
        if q.stride(-1) != 1:
            q = q.contiguous()
        result = written_for(out, self._interpreted)
        if plan.num_tokens < len(out):
            result[plan.num_tokens :].zero_()
            if lse is not None:
                lse[plan.num_tokens :].zero_()
        if plan.batch.num_decodes:
            self._decode(layer, q, cache, plan, result, lse)
        if plan.units is not None:
            tiles = self._tiles(layer.group, cache.k.dtype.itemsize, long=True)
            sums = None if lse is None else lse[None]
            self._launch(layer, q, cache, plan, tiles, len(plan.units), result[None], sums)
        if result is not out:
            out.copy_(result)

    def _decode(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: LayerCache,
        plan: SparsePlan,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """The first rows, of one token each. How many programs share one follows from their number alone: a captured
        step is right, and fast, for longer rows."""
        rows, (_, heads, size) = plan.batch.num_decodes, q.shape
        tiles = self._tiles(layer.group, cache.k.dtype.itemsize, long=False)
        programs = rows * heads // self._packed(layer.group, tiles)
        splits = max(1, min(MOST_SPLITS, tiles.per_processor * self._processors // programs))
        splits = 1 << (splits.bit_length() - 1)
        if splits == 1:
            self._launch(layer, q, cache, plan, tiles, rows, out[None], None if lse is None else lse[None], one=True)
            return
        parts = torch.empty((splits, rows, heads, size), dtype=torch.float32, device=q.device)
        sums = torch.empty((splits, rows, heads), dtype=torch.float32, device=q.device)
        self._launch(layer, q, cache, plan, tiles, rows, parts, sums, one=True)
        join_kernel[(rows, heads)](
            out, lse, parts, sums, out.stride()[:2], (0, 0) if lse is None else lse.stride(), parts.stride()[:3],
            sums.stride(), HEAD_SIZE=size, BLOCK_D=_width(size), SPLITS=splits, LSE=lse is not None, num_warps=1,
        )  # fmt: skip

    def _launch(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: LayerCache,
        plan: SparsePlan,
        tiles: Tiles,
        units: int,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        one: bool = False,
    ) -> None:
        """out [splits, T, Hq, D], lse [splits, T, Hq]."""
        batch, group, pattern = plan.batch, layer.group, self._pattern
        heads, packed = group.num_q_heads // group.num_kv_heads, self._packed(group, tiles)
        first, total = self.first_head(group)
        queries = 1 if one else max(1, tiles.rows // packed)
        form = SparseForm(
            KV_HEADS=group.num_kv_heads,
            GROUP=heads,
            PACKED=packed,
            HEAD_SIZE=group.head_size,
            BLOCK_D=_width(group.head_size),
            PAGE=group.tokens_per_block,
            BLOCK_M=_width(queries * packed),
            BLOCK_N=min(tiles.keys, _width(pattern.block)),
            BLOCK=pattern.block,
            LOCAL=pattern.local,
            STRIDE=pattern.stride,
            SINKS=pattern.sinks,
            SHIFTS=pattern.shifts,
            ONE=one,
            SPLITS=len(out),
            LSE=lse is not None,
            WIDEN=widens(q.dtype, self._interpreted),
        )
        block_sparse_kernel[(units * group.num_kv_heads * triton.cdiv(heads, packed), len(out))](
            out,
            lse,
            q,
            (cache.k, cache.v),
            (batch.block_table, batch.kv_index, plan.units if not one else None),
            layer.scale * LOG2E,
            first,
            pattern.step(total),
            out.stride()[:3],
            (0, 0, 0) if lse is None else lse.stride(),
            q.stride()[:2],
            cache.k.stride()[:3],
            batch.block_table.stride(0),
            FORM=form,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


def _width(size: int) -> int:
    """Up to a power of two; products take 16 at least."""
    return int(max(16, triton.next_power_of_2(size)))
