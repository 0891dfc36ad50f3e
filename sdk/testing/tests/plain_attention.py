"""A second attention driver, written to be broken: right as it stands, each mutant below with one planted fault.

One token after another, in float64, straight from the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, LayerCache
from engine.types.kv import KVGroup


class PlainPlan:
    """Where each token goes, and which row and place each query has."""

    def __init__(self) -> None:
        self.slots = torch.empty(0)
        self.queries: list[tuple[int, int, int]] = []
        self.table = torch.empty(0)
        self.lengths: list[int] = []
        self.hidden: list[int] | None = None


class PlainCache(LayerCache):
    """With the scales of codes of 8 bits, [num_pages, tokens_per_block, num_kv_heads] of keys and of values."""

    scales: tuple[torch.Tensor, torch.Tensor] | None = None


def scales_of(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Those of a cache that has some."""
    return getattr(cache, "scales", None)


class Plain:
    """See `engine.interfaces.attention.AttentionBackend`."""

    capture_level = "none"

    def __init__(self, context: Any) -> None:
        del context

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> LayerCache:
        dtype = getattr(torch, need.kv_dtype)
        shape = (2, group.tokens_per_block, group.num_kv_heads, group.head_size)
        vectors = shape[0] * shape[1] * shape[2]
        size = vectors * shape[3] * dtype.itemsize
        both = pages[:, :size].view(dtype).unflatten(1, shape)
        cache = PlainCache(both[:, 0], both[:, 1])
        if dtype.itemsize == 1:
            scales = pages[:, size : size + vectors * 2].view(torch.bfloat16).unflatten(1, shape[:-1])
            cache.scales = scales[:, 0], scales[:, 1]
        return cache

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        plan = PlainPlan() if out is None else out
        plan.slots = batch.slot_mapping
        plan.table = self.table(batch)
        plan.lengths = batch.seq_lens.tolist()
        plan.hidden = None if batch.hidden is None else self.hidden(batch.hidden).tolist()
        plan.queries = []
        start = batch.query_start_loc_host
        for row in range(batch.num_rows):
            for token in range(start[row], start[row + 1]):
                plan.queries.append((token, row, self.place(batch, row, token)))
        return plan

    def table(self, batch: AttentionBatch) -> torch.Tensor:
        return batch.block_table

    def hidden(self, bits: torch.Tensor) -> torch.Tensor:
        return bits

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        return int(batch.kv_index[token])

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: Any) -> None:
        size = layer.group.tokens_per_block
        page, offset = plan.slots // size, plan.slots % size
        if (scales := scales_of(cache)) is None:
            cache.k[page, offset] = k.to(cache.k.dtype)
            cache.v[page, offset] = v.to(cache.v.dtype)
            return
        for codes, scale, x in zip(cache, scales, (k, v), strict=True):
            codes[page, offset], scale[page, offset] = self.coded(x.double(), codes.dtype)

    def coded(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        limit = 127 if dtype == torch.int8 else 448
        scale = (x.abs().amax(-1) / limit).bfloat16()
        codes = (x / scale.double().unsqueeze(-1)).nan_to_num(0, 0, 0).clamp(-limit, limit)
        return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale.where(scale.isfinite(), torch.nan)

    def kept(self, cache: LayerCache, pages: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values, as attention takes them."""
        scales = scales_of(cache) or (None, None)
        return [self.decoded(x[pages, offsets], scale, pages, offsets) for x, scale in zip(cache, scales, strict=True)]

    def decoded(
        self, codes: torch.Tensor, scale: torch.Tensor | None, pages: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        return codes.double() if scale is None else codes.double() * scale[pages, offsets].double().unsqueeze(-1)

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        where = (slots // group.tokens_per_block, slots % group.tokens_per_block)
        if (scales := scales_of(cache)) is None:
            return cache.k[where], cache.v[where]
        found = [x[where].float() * scale[where].float().unsqueeze(-1) for x, scale in zip(cache, scales, strict=True)]
        return found[0], found[1]

    def move(self, group: KVGroup, cache: LayerCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        where = (destination // group.tokens_per_block, destination % group.tokens_per_block)
        for x in (*cache, *(scales_of(cache) or ())):
            x[where] = x[source // group.tokens_per_block, source % group.tokens_per_block]

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
        out.zero_()
        if lse is not None:
            lse.zero_()
        for token, row, place in plan.queries:
            if layer.group.kind == "encoder":
                own, seen = self.around(token, row, plan, layer)
                keys, values = k[own].double(), v[own].double()
            else:
                bits = 0 if plan.hidden is None else plan.hidden[token]
                seen = self.nodes(place, bits, layer) if bits else self.seen(place, layer, plan.lengths[row])
                size = layer.group.tokens_per_block
                pages = plan.table[row, seen // size].long()
                keys, values = self.kept(cache, pages, self.offsets(seen, size))
            repeat = q.shape[1] // keys.shape[1]
            keys, values = (self.repeated(x, repeat) for x in (keys, values))
            scores = self.capped(torch.einsum("hd,shd->hs", q[token].double(), keys) * layer.scale, layer)
            distance = (place - seen).abs()
            if layer.group.kind != "encoder" and bits:
                distance = self.steps(place, seen)
            scores = self.sloped(scores, distance, layer)
            behind = seen < place if layer.group.kind == "encoder" else torch.ones_like(distance, dtype=torch.bool)
            scores = self.biased(scores, torch.where(behind, -distance, distance), layer)
            scores = self.with_sink(scores, layer)
            weights, total = torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1)
            out[token] = torch.einsum("hs,shd->hd", weights[:, : len(values)], values).to(out.dtype)
            if lse is not None:
                lse[token] = self.logarithm(total)

    def around(self, token: int, row: int, plan: PlainPlan, layer: AttentionLayer) -> tuple[list[int], torch.Tensor]:
        """The tokens that one sees of its row, and their places, where nothing is kept."""
        own = [(t, p) for t, r, p in plan.queries if r == row]
        (place,) = [p for t, p in own if t == token]
        near = [(t, p) for t, p in own if self.is_near(p - place, layer.need.sliding_window)]
        return [t for t, _ in near], torch.tensor([p for _, p in near])

    def is_near(self, ahead: int, window: int | None) -> bool:
        return window is None or abs(ahead) < window

    def seen(self, place: int, layer: AttentionLayer, length: int) -> torch.Tensor:
        window = layer.need.sliding_window
        return torch.arange(0 if window is None else max(0, place - window + 1), place + 1)

    def nodes(self, place: int, bits: int, layer: AttentionLayer) -> torch.Tensor:
        """What a node of a tree sees."""
        first = self.first(place, bits, layer.need.sliding_window)
        return torch.tensor([key for key in range(first, place + 1) if place - key > 63 or not bits >> place - key & 1])

    def first(self, place: int, bits: int, window: int | None) -> int:
        return 0 if window is None else max(0, place - (bits % 2**64).bit_count() - window + 1)

    def steps(self, place: int, seen: torch.Tensor) -> torch.Tensor:
        """From a node to each of the keys that it sees."""
        return torch.arange(len(seen)).flip(0)

    def offsets(self, seen: torch.Tensor, size: int) -> torch.Tensor:
        return seen % size

    def repeated(self, x: torch.Tensor, times: int) -> torch.Tensor:
        return x.repeat_interleave(times, dim=1)

    def capped(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        cap = layer.need.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def sloped(self, scores: torch.Tensor, distance: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        slopes = layer.alibi_slopes
        return scores if slopes is None else scores - slopes.double()[:, None] * distance

    def biased(self, scores: torch.Tensor, ahead: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        table = layer.relative_bias
        if table is None:
            return scores
        span = table.shape[1] // 2
        return scores + table.double()[:, ahead.clamp(-span, span) + span]

    def with_sink(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return scores if layer.sinks is None else torch.cat([scores, layer.sinks.double()[:, None]], dim=1)

    def logarithm(self, total: torch.Tensor) -> torch.Tensor:
        return total
