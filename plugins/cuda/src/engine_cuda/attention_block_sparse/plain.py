"""The block-sparse attention in plain torch, for any device: the oracle of its kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel, LayerCache
from engine.types.kv import KVGroup
from engine_cuda.attention_block_sparse.pattern import Pattern

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cuda.attention_block_sparse.card import BlockSparseOptions

logger = logging.getLogger(__name__)
MAX_SCORES = 1 << 24
"""Most scores that are held at once; a block with more queries is computed in pieces."""


class Keys(NamedTuple):
    """The keys that some heads' queries see, all of one block.

    Args:
        heads: int64 [h], the query heads; None for all.
        pages: int32 [n], to be gathered.
        inside: int64 [num_keys], the places of the keys among those gathered; None for the first ones.
        num_keys: how many. The last ones are those of the queries' own block.
    """

    heads: torch.Tensor | None
    pages: torch.Tensor
    inside: torch.Tensor | None
    num_keys: int


class Piece(NamedTuple):
    """Queries of one row and one block, which see the same blocks.

    Args:
        start, stop: their tokens.
        unseen: bool [stop - start, m]; which of the own block's m keys each does not see.
        keys: by groups of heads; none where the queries see nothing.
    """

    start: int
    stop: int
    unseen: torch.Tensor
    keys: list[Keys]


@dataclass(slots=True)
class PlainPlan:
    """What `PlainBlockSparse.plan` makes.

    Args:
        page, offset: int64 [T]; where each token's K and V are written.
        pieces: of all rows.
        num_tokens: of real rows; the tokens after it are padding.
    """

    page: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    offset: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0


class PlainBlockSparse:
    """See `engine.interfaces.attention.AttentionBackend`.

    A page of a layer holds, for each KV head, its keys and then its values, [tokens_per_block, head_size] each.
    """

    capture_level: CaptureLevel = "none"

    def __init__(self, context: WorkerContext) -> None:
        options: BlockSparseOptions = context.options
        self._start = context.start
        self._pattern = Pattern(options.block, options.local, options.stride, options.sinks, options.homo_head)
        if context.start.place.rank == 0:
            logger.warning(
                "attention block_sparse leaves out keys: %s; a model that was trained to see all of them answers "
                "otherwise",
                self._pattern,
            )

    def first_head(self, group: KVGroup) -> tuple[int, int]:
        """Which of the model's query heads is the first on this rank, and how many there are."""
        place, tp = self._start.place, self._start.parallel.tp
        if tp == 1 or not self._start.sites[group.sites[0]].divided:
            return 0, group.num_q_heads
        return place.tp_rank * group.num_q_heads, tp * group.num_q_heads

    # -- the cache ---------------------------------------------------------------------------------------------------
    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> LayerCache:
        """Views [num_pages, num_kv_heads, tokens_per_block, head_size] of uint8 pages [num_pages, layer_bytes]."""
        dtype: torch.dtype = getattr(torch, need.kv_dtype)
        shape = (group.num_kv_heads, 2, group.tokens_per_block, group.head_size)
        elements = shape[0] * shape[1] * shape[2] * shape[3]
        both = pages[:, : elements * dtype.itemsize].view(dtype).unflatten(1, shape)
        return LayerCache(both[:, :, 0], both[:, :, 1])

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: Any) -> None:
        """Store k, v [T, num_kv_heads, head_size], as `engine_cuda.attention_storing.stored` does."""
        del layer
        dtype = cache.k.dtype
        if dtype.itemsize == 1:
            limits = torch.finfo(dtype)
            k, v = (x.clamp(limits.min, limits.max) for x in (k, v))
        else:
            k, v = k.to(dtype), v.to(dtype)
        broken = ~v.isfinite().all(dim=-1, keepdim=True)
        where = (plan.page, slice(None), plan.offset)
        cache.k[where], cache.v[where] = k.masked_fill(broken, torch.nan).to(dtype), v.masked_fill(broken, 0).to(dtype)

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.attention.AttentionBackend.read`."""
        where = (slots // group.tokens_per_block, slice(None), slots % group.tokens_per_block)
        return cache.k[where], cache.v[where]

    # -- plans -------------------------------------------------------------------------------------------------------
    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        """The keys of each row's queries, which all layers of the group share."""
        plan = PlainPlan() if out is None else out
        plan.page = torch.div(batch.slot_mapping, group.tokens_per_block, rounding_mode="floor")
        plan.offset = batch.slot_mapping - plan.page * group.tokens_per_block
        plan.num_tokens = int(batch.query_start_loc_host[batch.num_rows])
        plan.pieces = list(self._pieces(batch, group))
        return plan

    def _pieces(self, batch: AttentionBatch, group: KVGroup) -> Iterator[Piece]:
        index = batch.kv_index.cpu().numpy()
        size = self._pattern.block
        first, total = self.first_head(group)
        by_shift: dict[int, list[int]] = {}
        for head in range(group.num_q_heads):
            by_shift.setdefault(self._pattern.shift(first + head, total), []).append(head)
        for row, (start, stop) in enumerate(pairwise(batch.query_start_loc_host[: batch.num_rows + 1].tolist())):
            places = index[start:stop]
            blocks = np.where(places < 0, -1, places // size)
            cuts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), stop - start]
            for begin, end in pairwise(cuts):
                own, num_own = int(blocks[begin]), int(places[begin:end].max()) % size + 1
                if own < 0:
                    yield Piece(start + begin, start + end, torch.empty(0), [])
                    continue
                keys = [
                    self._keys(batch.block_table[row], group, own, num_own, shift, heads if len(by_shift) > 1 else None)
                    for shift, heads in by_shift.items()
                ]
                at_once = max(1, MAX_SCORES // (group.num_q_heads * max(of.num_keys for of in keys)))
                last = torch.arange(own * size, own * size + num_own, device=batch.kv_index.device)
                for at in range(start + begin, start + end, at_once):
                    to = min(at + at_once, start + end)
                    yield Piece(at, to, last > batch.kv_index[at:to, None], keys)

    def _keys(
        self, table: torch.Tensor, group: KVGroup, own: int, num_own: int, shift: int, heads: list[int] | None
    ) -> Keys:
        size, per_page = self._pattern.block, group.tokens_per_block
        seen = self._pattern.seen(own, shift)
        keys = (seen[:, None] * size + np.arange(size)).ravel()[: (len(seen) - 1) * size + num_own]
        pages, which = np.unique(keys // per_page, return_inverse=True)
        inside = which * per_page + keys % per_page
        plain = bool((inside == np.arange(len(keys))).all())

        def there(x: Any) -> torch.Tensor:
            return torch.as_tensor(x, device=table.device)

        return Keys(
            None if heads is None else there(heads),
            table[there(pages)],
            None if plain else there(inside),
            len(keys),
        )

    # -- attention ---------------------------------------------------------------------------------------------------
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
        """See `engine.interfaces.attention.AttentionBackend.forward`. Scores are computed in float32 at least."""
        for piece in plan.pieces:
            for keys in piece.keys:
                _attend(layer, q, cache, piece, keys, out, lse)
            if not piece.keys:
                out[piece.start : piece.stop] = 0
                if lse is not None:
                    lse[piece.start : piece.stop] = -torch.inf
        out[plan.num_tokens :] = 0
        if lse is not None:
            lse[plan.num_tokens :] = 0


def _attend(
    layer: AttentionLayer,
    q: torch.Tensor,
    cache: LayerCache,
    piece: Piece,
    of: Keys,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    tokens, num_tokens, num_heads = slice(piece.start, piece.stop), piece.stop - piece.start, q.shape[1]
    size, group = layer.group.head_size, num_heads // layer.group.num_kv_heads
    keys, values = (_gather(x, of, q.dtype) for x in (cache.k, cache.v))
    # [n, queries, D] and [n, keys, D]: the query heads of a KV head stand one behind the other where all see the same
    if of.heads is None:
        heads: torch.Tensor | slice = slice(None)
        asked = q[tokens].transpose(0, 1).reshape(len(keys), group * num_tokens, size)
    else:
        heads = of.heads
        keys, values = keys[heads // group], values[heads // group]
        asked = q[tokens, heads].transpose(0, 1)
    scores = torch.bmm(asked.to(keys.dtype) * layer.scale, keys.transpose(1, 2)).view(-1, num_tokens, of.num_keys)
    scores[..., of.num_keys - piece.unseen.shape[1] :].masked_fill_(piece.unseen, -torch.inf)
    weights = torch.softmax(scores, dim=-1).view(len(keys), -1, of.num_keys)
    result = torch.bmm(weights, values).view(-1, num_tokens, size).transpose(0, 1)
    out[tokens, heads] = result.to(out.dtype)
    if lse is not None:
        lse[tokens, heads] = torch.logsumexp(scores, dim=-1).T.to(lse.dtype)


def _gather(pages: torch.Tensor, of: Keys, dtype: torch.dtype) -> torch.Tensor:
    """[num_kv_heads, num_keys, head_size], in float32 at least."""
    _, heads, _, size = pages.shape
    found = pages.index_select(0, of.pages).transpose(0, 1).reshape(heads, -1, size)
    found = found[:, : of.num_keys] if of.inside is None else found.index_select(1, of.inside)
    return found.to(torch.float64 if dtype == torch.float64 else torch.float32)
