"""The body of the reference attention.

A page of a layer holds K, then V, each [num_kv_heads, tokens_per_block, head_size]: a head's tokens lie together, so
that gathered pages turn into one matrix a head by copying whole runs. In 8 bits there follow, where the page has room
for them, the scales of K and of V in bfloat16, each [num_kv_heads, tokens_per_block]; else scales are 1. Scores are
computed in float32 at least. The query heads of a group share their K and V: they are folded into the query length
(decode: [rows * kv heads, group, head size]), so that each K is read once.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel, LayerCache
from engine.types.kv import KVGroup
from engine_reference.attention_torch.card import SCALE_BYTES
from engine_reference.attention_torch.plan import DecodeChunk, PrefillRow, TorchPlan

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

MAX_SCORES = 1 << 24
"""Most scores that a prefill holds at once; longer ones are computed in chunks of queries."""


def scores_of(layer: AttentionLayer, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [b, n, D], keys [b, S, D] -> [b, n, S] in the precision of keys, soft-capped."""
    scores = torch.bmm(queries.to(keys.dtype) * layer.scale, keys.transpose(1, 2))
    cap = layer.need.soft_cap
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def weights_of(
    scores: torch.Tensor, sinks: torch.Tensor | None, want_total: bool, blind: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """scores [..., S] -> (weights [..., S], where wanted logarithms of the sums of their exponentials [...]).

    sinks: of the shape [...], or one that broadcasts to it. A sink is one more score, whose weight goes to nobody.
    blind: bool, likewise: where all scores are -inf, for a query that sees nothing. Its weights are 0.
    """
    if sinks is None:
        total = torch.logsumexp(scores, dim=-1) if want_total else None
        if blind is None:
            return torch.softmax(scores, dim=-1), total
        weights = torch.softmax(scores.masked_fill(blind.unsqueeze(-1), 0), dim=-1)
        return weights.masked_fill_(blind.unsqueeze(-1), 0), total
    total = torch.logaddexp(torch.logsumexp(scores, dim=-1), sinks.to(scores.dtype))
    return torch.exp(scores - total.unsqueeze(-1)), total


def bias_of(table: torch.Tensor, ahead: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What each head adds to its scores of keys that stand so many places ahead of their queries, int64 [..., S]: a
    table `engine.interfaces.attention.AttentionLayer.relative_bias` -> [heads, ..., S]."""
    span = table.shape[1] // 2
    return table.to(dtype)[:, ahead.clamp(-span, span) + span]


def see_nothing(out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> None:
    """The results [n, Hq, D] and [n, Hq] of queries that see no key, but their heads' sinks where there are some."""
    out.zero_()
    if lse is not None:
        lse[:] = -torch.inf if sinks is None else sinks.to(lse.dtype)


def stored(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., P] and values [..., C] (of latent attention the rotated keys and the latents) as the cache holds them.

    They are rounded to the cache's dtype; what fp8 cannot hold becomes its largest number, and not a NaN. A vector of
    values that are not all finite is stored as zeros, and its key as NaN: a value that a query does not see is
    multiplied by 0, and 0 * NaN is NaN, but its score is overwritten. Who sees it still gets NaN, as it must.
    """
    if dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        keys, values = (x.clamp(limits.min, limits.max) for x in (keys, values))
    else:
        keys, values = keys.to(dtype), values.to(dtype)
    # On the CPU one sum costs a tenth of looking at each element; elsewhere asking would wait for the device.
    if values.device.type != "cpu" or not math.isfinite(values.sum()):
        broken = ~values.isfinite().all(dim=-1, keepdim=True)
        keys, values = keys.masked_fill(broken, torch.nan), values.masked_fill(broken, 0)
    return keys.to(dtype), values.to(dtype)


def coded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values [..., D] in 8 bits, and bfloat16 scales [...]: of each the largest magnitude has the largest code.

    Codes are of x divided by its scale as it is rounded, which moves the largest by less than half a step: what is read
    and written again has the same bits. The scale is NaN where an element is no number; codes are always numbers.
    """
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    step = wide.abs().amax(dim=-1) / limit
    scales = torch.where(step < torch.finfo(torch.float32).tiny, 0, step).bfloat16()
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    divided = (wide / scales.to(wide.dtype).unsqueeze(-1)).nan_to_num(0, 0, 0).clamp(-limit, limit)
    return (divided.round() if dtype == torch.int8 else divided).to(dtype), scales


def forward_encoder(
    layer: AttentionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: list[int],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See `engine.interfaces.attention.AttentionBackend.forward`; row r has the tokens bounds[r] .. bounds[r + 1] - 1.

    Scores are computed in float32 at least.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, groups, window = q.shape[1], q.shape[1] // k.shape[1], layer.need.sliding_window
    if window is not None:
        k, v = stored(k, v, k.dtype)  # not every query sees every value
    for start, stop in pairwise(bounds):
        # [heads, keys, head_size]; the queries of a group share their keys
        keys, values = (x[start:stop].transpose(0, 1).to(wide).repeat_interleave(groups, dim=0) for x in (k, v))
        at_once = max(1, MAX_SCORES // (heads * (stop - start)))
        for first in range(start, stop, at_once):
            last = min(first + at_once, stop)
            scores = scores_of(layer, q[first:last].transpose(0, 1), keys)
            place = torch.arange(stop - start, device=q.device)
            ahead = place - place[first - start : last - start].unsqueeze(1)
            if layer.alibi_slopes is not None:
                scores -= layer.alibi_slopes.to(wide).view(-1, 1, 1) * ahead.abs()
            if layer.relative_bias is not None:
                scores += bias_of(layer.relative_bias, ahead, wide)
            if window is not None:
                scores.masked_fill_(ahead.abs() >= window, -torch.inf)
            sinks = None if layer.sinks is None else layer.sinks.unsqueeze(1)
            weights, total = weights_of(scores, sinks, lse is not None)
            out[first:last] = torch.bmm(weights, values).transpose(0, 1)
            if lse is not None and total is not None:
                lse[first:last] = total.T


class TorchLayerCache(LayerCache):
    """One layer's views; of codes of 8 bits also their scales."""

    scales: LayerCache | None = None


class TorchAttentionBody:
    """Paged attention with grouped heads, sliding window, soft cap, sinks, ALiBi, relative biases, any `kv_index` and
    trees."""

    capture_level: CaptureLevel = "none"
    """A plan's shapes follow the lengths of the step, so what it launches cannot be replayed for the next one."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> LayerCache:
        """Views [num_pages, num_kv_heads, tokens_per_block, head_size] of uint8 pages [num_pages, layer_bytes]."""
        dtype: torch.dtype = getattr(torch, need.kv_dtype)
        shape = (2, group.num_kv_heads, group.tokens_per_block, group.head_size)
        vectors = shape[0] * shape[1] * shape[2]
        elements = vectors * group.head_size * dtype.itemsize
        both = pages[:, :elements].view(dtype).unflatten(1, shape)
        cache = TorchLayerCache(both[:, 0], both[:, 1])
        if dtype.itemsize == 1 and group.layer_bytes >= elements + vectors * SCALE_BYTES:
            scales = pages[:, elements : elements + vectors * SCALE_BYTES].view(torch.bfloat16).unflatten(1, shape[:-1])
            cache.scales = LayerCache(scales[:, 0], scales[:, 1])
        return cache

    def plan(self, batch: AttentionBatch, group: KVGroup, out: TorchPlan | None = None) -> TorchPlan:
        """The step's pages and masks, which all layers of the group share."""
        plan = TorchPlan() if out is None else out
        plan.fill(batch, group)
        return plan

    def write(
        self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: TorchPlan
    ) -> None:
        """Store k, v [T, num_kv_heads, head_size], see `stored` and `coded`."""
        del layer
        where = (plan.page, slice(None), plan.offset)
        if (scales := _scales(cache)) is None:
            cache.k[where], cache.v[where] = stored(k, v, cache.k.dtype)
            return
        (cache.k[where], of_keys), (cache.v[where], of_values) = (coded(x, cache.k.dtype) for x in (k, v))
        broken = of_values.isnan()  # see `stored`
        scales.k[where] = of_keys.masked_fill(broken, torch.nan)
        scales.v[where] = of_values.masked_fill(broken, 0)

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.attention.AttentionBackend.read`."""
        where = (slots // group.tokens_per_block, slice(None), slots % group.tokens_per_block)
        if (scales := _scales(cache)) is None:
            return cache.k[where], cache.v[where]
        found = [x[where].float() * scale[where].float().unsqueeze(-1) for x, scale in zip(cache, scales, strict=True)]
        return found[0], found[1]

    def move(self, group: KVGroup, cache: LayerCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        """See `engine.interfaces.attention.AttentionBackend.move`."""
        size, every = group.tokens_per_block, slice(None)
        for x in (*cache, *(_scales(cache) or ())):
            x[destination // size, every, destination % size] = x[source // size, every, source % size]

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        plan: TorchPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `engine.interfaces.attention.AttentionBackend.forward`."""
        if layer.group.kind == "encoder":
            forward_encoder(layer, q, k, v, plan.bounds, out, lse)
        # Of all other kinds, k and v are in the cache, and rows without any are none.
        for chunk in plan.decodes:
            _decode(layer, q, cache, chunk, out, lse)
        for row in plan.prefills:
            _prefill(layer, q, cache, row, out, lse)
        if plan.num_tokens < len(q):
            out[plan.num_tokens :] = 0
            if lse is not None:
                lse[plan.num_tokens :] = 0


def _decode(
    layer: AttentionLayer,
    q: torch.Tensor,
    cache: LayerCache,
    chunk: DecodeChunk,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    rows = chunk.stop - chunk.start
    heads, size = layer.group.num_kv_heads, layer.group.head_size
    grouped = q[chunk.start : chunk.stop].reshape(rows * heads, -1, size)
    of_keys, of_values = _scales(cache) or (None, None)
    keys = _gather(cache.k, of_keys, chunk, rows, grouped.dtype)
    values = _gather(cache.v, of_values, chunk, rows, grouped.dtype)
    scores = scores_of(layer, grouped, keys)
    if layer.alibi_slopes is not None:
        slopes = layer.alibi_slopes.to(scores.dtype).view(1, -1, 1)
        scores.view(rows, -1, chunk.num_keys).sub_(slopes * chunk.distance.unsqueeze(1))
    if layer.relative_bias is not None:  # keys ahead of the query are hidden
        bias = bias_of(layer.relative_bias, -chunk.distance, scores.dtype)
        scores.view(rows, -1, chunk.num_keys).add_(bias.transpose(0, 1))
    if chunk.hidden is not None:
        scores.view(rows, -1, chunk.num_keys).masked_fill_(chunk.hidden.unsqueeze(1), -torch.inf)
        # Hidden keys have weight 0, but 0 * NaN would still spoil the sum.
        values.view(rows, heads, chunk.num_keys, size).masked_fill_(chunk.hidden[:, None, :, None], 0)
    blind = None if chunk.blind is None else chunk.blind.unsqueeze(1)
    weights, total = weights_of(scores.view(rows, -1, chunk.num_keys), layer.sinks, lse is not None, blind)
    out[chunk.start : chunk.stop] = torch.bmm(weights.view(scores.shape), values).view(rows, -1, size)
    if lse is not None and total is not None:
        lse[chunk.start : chunk.stop] = total


def _prefill(
    layer: AttentionLayer,
    q: torch.Tensor,
    cache: LayerCache,
    row: PrefillRow,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    num_heads = q.shape[1]
    heads, size, window = layer.group.num_kv_heads, layer.group.head_size, layer.group.sliding_window
    per_block = layer.group.tokens_per_block
    at_once = max(1, MAX_SCORES // max(1, num_heads * len(row.table) * per_block))
    for start in range(row.start, row.stop, at_once):
        stop = min(start + at_once, row.stop)
        queries = slice(start - row.start, stop - row.start)
        index = position = row.kv_index[queries]
        branches = None
        if row.hidden is not None:
            branches = _Branches.of(row.hidden[queries])
            position = index - branches.counts[:, -1]
        lowest, highest = (int(bound) for bound in index.aminmax())
        blind = None
        if highest < 0:
            see_nothing(out[start:stop], None if lse is None else lse[start:stop], layer.sinks)
            continue
        if lowest < 0:
            blind = index < 0
        if blind is not None or branches is not None:
            lowest = int(position[index >= 0].min())
        first_key = 0 if window is None else max(0, lowest - window + 1)
        first_block, last_block = first_key // per_block, highest // per_block
        pages = row.table[first_block : last_block + 1]
        inside = slice(first_key - first_block * per_block, highest + 1 - first_block * per_block)
        of_keys, of_values = _scales(cache) or (None, None)
        keys = _gather_row(cache.k, of_keys, pages, inside, q.dtype)
        values = _gather_row(cache.v, of_values, pages, inside, q.dtype)
        key = torch.arange(first_key, highest + 1, device=q.device)
        before = index.unsqueeze(1) - key  # places between a query and a key
        hidden = before < 0
        if branches is not None:
            hidden |= branches.hide(before)
        if window is not None:
            hidden |= key <= position.unsqueeze(1) - window
            # Between queries that lie far apart, keys that no window reaches may be stale.
            values.masked_fill_(hidden.all(dim=0)[:, None], 0)
        grouped = q[start:stop].view(stop - start, heads, -1, size).permute(1, 2, 0, 3)
        scores = scores_of(layer, grouped.reshape(heads, -1, size), keys)
        scores = scores.view(num_heads, stop - start, len(key))
        if layer.alibi_slopes is not None or layer.relative_bias is not None:
            distance = before if branches is None else before - branches.between(before)
            if layer.alibi_slopes is not None:
                scores.sub_(layer.alibi_slopes.to(scores.dtype).view(-1, 1, 1) * distance.abs())
            if layer.relative_bias is not None:
                scores.add_(bias_of(layer.relative_bias, -distance, scores.dtype))
        scores.masked_fill_(hidden, -torch.inf)
        sinks = None if layer.sinks is None else layer.sinks.unsqueeze(1)
        weights, total = weights_of(scores, sinks, lse is not None, blind)
        result = torch.bmm(weights.view(heads, -1, len(key)), values).view(heads, -1, stop - start, size)
        out[start:stop] = result.permute(2, 0, 1, 3).reshape(stop - start, num_heads, size)
        if lse is not None and total is not None:
            lse[start:stop] = total.T


class _Branches(NamedTuple):
    """What the nodes of a tree of drafts do not see, see `engine.interfaces.attention.AttentionBatch.hidden`.

    Args:
        bits: int64 [n, 64], 0 or 1; of each query's keys so many places before it.
        counts: int64 [n, 64]; how many of them up to there.
    """

    bits: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, hidden: torch.Tensor) -> _Branches:
        """hidden: int64 [n]."""
        bits = (hidden.unsqueeze(1) >> torch.arange(64, device=hidden.device)) & 1
        return cls(bits, bits.cumsum(1))

    def hide(self, before: torch.Tensor) -> torch.Tensor:
        """bool [n, S]; which keys are not seen, that stand so many places before each query: int64 [n, S]."""
        return self.bits.gather(1, before.clamp(0, 63)).bool() & (before < 64)

    def between(self, before: torch.Tensor) -> torch.Tensor:
        """int64 [n, S]; how many of those between each query and a key that it sees."""
        return self.counts.gather(1, before.clamp(0, 63))


def _scales(cache: LayerCache) -> LayerCache | None:
    return cache.scales if isinstance(cache, TorchLayerCache) else None


def _gather(
    pages: torch.Tensor, scales: torch.Tensor | None, chunk: DecodeChunk, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """[rows * num_kv_heads, num_keys, head_size], in float32 at least. index_select beats indexing several times."""
    _, heads, per_block, size = pages.shape
    gathered = pages.index_select(0, chunk.pages).view(rows, chunk.num_blocks, heads, per_block, size)
    result = _widened_empty((rows, heads, chunk.num_blocks, per_block, size), gathered, dtype)
    result.copy_(gathered.transpose(1, 2))
    if scales is not None:
        some = scales.index_select(0, chunk.pages).view(rows, chunk.num_blocks, heads, per_block, 1)
        result.mul_(some.transpose(1, 2))
    return result.view(rows * heads, chunk.num_blocks * per_block, size)[:, : chunk.num_keys]


def _gather_row(
    pages: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, inside: slice, dtype: torch.dtype
) -> torch.Tensor:
    """[num_kv_heads, keys, head_size] of one row's pages, in float32 at least."""
    _, heads, per_block, size = pages.shape
    gathered = pages.index_select(0, table)
    result = _widened_empty((heads, len(table), per_block, size), gathered, dtype)
    result.copy_(gathered.transpose(0, 1))
    if scales is not None:
        result.mul_(scales.index_select(0, table).transpose(0, 1).unsqueeze(-1))
    return result.view(heads, len(table) * per_block, size)[:, inside]


def _widened_empty(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.empty(shape, dtype=wide, device=like.device)
