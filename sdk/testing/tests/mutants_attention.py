"""Attention drivers with one planted fault each; a class a mutant, whose docstring names the fault."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from heavy_card import Heavy
from mutant_suites import suites_of
from plain_attention import Plain, scales_of
from plain_cards import GivesNoLse, NamesNoBody, PlainAttention, PlainLatentAttention, ServesEverything, Undecided
from plain_latent import PlainLatent

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, LayerCache
from engine.types.kv import KVGroup
from engine_sdk.conformance import AttentionConformance


class SeesOneMore(Plain):
    """off-by-one causal mask: a query sees the key after its own"""

    def seen(self, place: int, layer: AttentionLayer, length: int) -> torch.Tensor:
        return super().seen(min(place + 1, length - 1), layer, length)


class SeesOneLess(Plain):
    """off-by-one causal mask: a query does not see its own key"""

    def seen(self, place: int, layer: AttentionLayer, length: int) -> torch.Tensor:
        return super().seen(max(place - 1, 0), layer, length)


class IgnoresTable(Plain):
    """ignored block table: a row's pages are taken to lie one after the other"""

    def table(self, batch: AttentionBatch) -> torch.Tensor:
        first = batch.block_table[:, :1]
        return first + torch.arange(batch.block_table.shape[1], dtype=torch.int32)

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        plan.table = plan.table % max(1, len(cache.k)) if layer.group.kind != "encoder" else plan.table
        super().forward(layer, q, k, v, cache, plan, out, lse)


class WindowOffByOne(Plain):
    """sliding window one key too wide"""

    def seen(self, place: int, layer: AttentionLayer, length: int) -> torch.Tensor:
        window = layer.need.sliding_window
        return torch.arange(0 if window is None else max(0, place - window), place + 1)


class NoSoftCap(Plain):
    """soft cap left out"""

    def capped(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return scores


class LseInBase2(Plain):
    """lse in base 2"""

    def logarithm(self, total: torch.Tensor) -> torch.Tensor:
        return total / math.log(2)


class RoundsLse(Plain):
    """lse is rounded to float32 where queries are float64"""

    def logarithm(self, total: torch.Tensor) -> torch.Tensor:
        return total.float()


class ReadsHiddenPages(Plain):
    """what is not seen is read with weight 0, so that stale pages and NaN in them spoil the sum"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q, k, v, cache, plan, out, lse)
        if layer.group.kind == "encoder":
            return
        for token, row, place in plan.queries:
            size = layer.group.tokens_per_block
            block = cache.v[plan.table[row, place // size].long()]
            out[token] += (block * 0).sum().to(out.dtype)


class WeighsByNothing(Plain):
    """the values that a query does not see are multiplied by 0, which NaN and infinity survive, before its row's end"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q, k, v, cache, plan, out, lse)
        size = layer.group.tokens_per_block
        if layer.group.kind == "encoder" or layer.need.sliding_window is not None:
            return
        furthest: dict[int, int] = {}
        for _, row, place in plan.queries:
            furthest[row] = max(place, furthest.get(row, 0))
        for token, row, place in plan.queries:
            for other in range(place + 1, furthest[row] + 1):
                out[token] += (
                    (cache.v[plan.table[row, other // size].long(), other % size].double() * 0).sum().to(out.dtype)
                )


class HidesNaN(Plain):
    """what is no number is stored as 0: who sees it gets numbers"""

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: Any) -> None:
        super().write(layer, k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0), cache, plan)

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q.nan_to_num(0, 0, 0), k, v, cache, plan, out, lse)


class MixesRows(Plain):
    """layers that keep nothing: values of other rows of the step are multiplied by 0, which NaN survives"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q, k, v, cache, plan, out, lse)
        if layer.group.kind == "encoder":
            out[: plan.queries[-1][0] + 1] += (v[: plan.queries[-1][0] + 1] * 0).sum().to(out.dtype)


class PaddedDraftsSpoilTheRow(Plain):
    """what lies where tokens pad a row of fewer drafts is read with weight 0, and NaN in it spoils the row"""

    capture_level = "uniform"

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q, k, v, cache, plan, out, lse)
        size = layer.group.tokens_per_block
        for token, row, place in plan.queries:
            if layer.group.kind != "encoder" and plan.slots[token] < size:
                unwritten = cache.v[plan.table[row, place // size].long(), place % size].sum() * 0
                for other, its_row, _ in plan.queries:
                    out[other] += unwritten.to(out.dtype) if its_row == row else 0


class IgnoresKvIndex(Plain):
    """kv_index ignored: a row's queries are taken to be its last keys"""

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        return int(batch.seq_lens[row]) - int(batch.query_start_loc[row + 1]) + token


class SeesTheFirstKey(Plain):
    """a query at kv_index -1 sees its row's first key"""

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        return max(0, super().place(batch, row, token)) if batch.seq_lens[row] else -1


class KeepsOldLengths(Plain):
    """plan(out=) keeps the lengths and places of the first step"""

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        if out is None:
            return super().plan(batch, group)
        queries = out.queries
        super().plan(batch, group, out)
        out.queries = queries
        return out


class KeepsOldTable(Plain):
    """plan(out=) keeps a copy of the first step's block table"""

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        table = None if out is None else out.table
        plan = super().plan(batch, group, out)
        plan.table = batch.block_table.clone() if table is None else table
        return plan


class KeepsItsRows(Plain):
    """plan(out=) keeps how many tokens each row of the first step had"""

    capture_level = "any"

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        bounds = batch.query_start_loc_host.copy() if out is None else out.bounds
        plan = super().plan(replace(batch, query_start_loc_host=bounds), group, out)
        plan.bounds = bounds
        return plan


class MakesNewPlan(Plain):
    """plan(out=) allocates another plan"""

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        return super().plan(batch, group)


class TrustsBound(Plain):
    """the bound of the lengths is taken for the lengths: decodes see keys past their row"""

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        decode = batch.query_start_loc_host[row + 1] - batch.query_start_loc_host[row] == 1
        return int(batch.seq_lens_bound[row]) - 1 if decode else super().place(batch, row, token)


class RefilledByLaunches:
    """Right: a plan of rows of one token names what lies on the device, which is read at each launch."""

    plans_by_launches = True

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        if out is not None and batch.num_rows == batch.num_tokens:
            return out
        plan = super().plan(batch, group, out)  # type: ignore[misc]
        plan.now = lambda: super(RefilledByLaunches, self).plan(batch, group, plan)  # type: ignore[misc]
        return plan


class Launched(RefilledByLaunches, Plain):
    """right: a plan that is refilled by launches"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q, k, v, cache, plan.now(), out, lse)


class LatentLaunched(RefilledByLaunches, PlainLatent):
    """right: the same of latent attention"""

    def forward(self, layer: Any, q_latent: Any, q_rope: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q_latent, q_rope, cache, plan.now(), out, lse)


class TrustsTheHost(Launched):
    """a plan that is refilled by launches goes on taking the lengths that the host knew when it was made"""

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        exact = batch.bounds_are_exact and batch.num_rows == batch.num_tokens
        return int(batch.seq_lens_bound[row]) - 1 if exact else super().place(batch, row, token)


class ReadsLengthsBack(Launched):
    """a refill that is said to be launches alone reads lengths back from the device"""

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        plan = super().plan(batch, group, out)
        plan.lengths = batch.seq_lens.tolist()
        return plan


class WrongGroups(Plain):
    """query heads are dealt to KV heads in turn, not in groups"""

    def repeated(self, x: torch.Tensor, times: int) -> torch.Tensor:
        return x.repeat(1, times, 1)


class OneForm(Plain):
    """the heads of the layer that it was told of last hold for all layers"""

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> LayerCache:
        self.times = need.num_q_heads // need.num_kv_heads
        return super().cache(need, group, pages)

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        self.encoder = layer.group.kind == "encoder"
        super().forward(layer, q, k, v, cache, plan, out, lse)

    def repeated(self, x: torch.Tensor, times: int) -> torch.Tensor:
        return super().repeated(x, times if self.encoder else self.times)


class NoScale(Plain):
    """scores are scaled by a constant of its own"""

    def capped(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().capped(scores / layer.scale * 0.25, layer) if layer.group.head_size != 16 else scores


class LeavesPadding(Plain):
    """the output of padding is not written"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        kept = out.clone()
        super().forward(layer, q, k, v, cache, plan, out, lse)
        real = plan.queries[-1][0] + 1
        out[real:] = kept[real:]


class WritesPastLayer(Plain):
    """keys are written into the layer after this one too"""

    def write(self, layer: AttentionLayer, k: Any, v: Any, cache: LayerCache, plan: Any) -> None:
        super().write(layer, k, v, cache, plan)
        beside = cache.v.as_strided(cache.v.shape, cache.v.stride(), cache.v.storage_offset() + cache.v[0].numel())
        beside[plan.slots // layer.group.tokens_per_block, 0] = 0


class SeesThePast(Plain):
    """layers that keep nothing: a token sees those before it alone"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        if layer.group.kind != "encoder":
            return super().forward(layer, q, k, v, cache, plan, out, lse)
        for index, (token, row, _) in enumerate(plan.queries):
            upto = type(plan)()
            upto.queries = [query for query in plan.queries[: index + 1] if query[1] == row]
            part, total = out.clone(), None if lse is None else lse.clone()
            super().forward(layer, q, k, v, cache, upto, part, total)
            out[token] = part[token]
            if lse is not None and total is not None:
                lse[token] = total[token]
        out[plan.queries[-1][0] + 1 :] = 0


class WindowToOneSide(Plain):
    """layers that keep nothing: a sliding window ends behind a token, and not ahead of it"""

    def is_near(self, ahead: int, window: int | None) -> bool:
        return window is None or ahead > -window


class NoWindowOfEncoders(Plain):
    """layers that keep nothing: a sliding window ignored"""

    def is_near(self, ahead: int, window: int | None) -> bool:
        return True


class TwoSidedOffByOne(Plain):
    """layers that keep nothing: a sliding window one key too wide"""

    def is_near(self, ahead: int, window: int | None) -> bool:
        return window is None or abs(ahead) <= window


class WeighsBeyondTheWindow(Plain):
    """layers that keep nothing: values beyond a sliding window are multiplied by 0, which NaN survives"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q, k, v, cache, plan, out, lse)
        if layer.group.kind == "encoder":
            for token, row, _ in plan.queries:
                out[token] += (v[[t for t, r, _ in plan.queries if r == row]] * 0).sum().to(out.dtype)


class AssumesDense(Plain):
    """queries are read as if they were contiguous, whatever their strides"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        q = q.as_strided(q.shape, torch.empty(q.shape).stride(), q.storage_offset())
        super().forward(layer, q, k, v, cache, plan, out, lse)


class NoSinks(Plain):
    """sinks ignored"""

    def with_sink(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return scores


class ScaledSinks(Plain):
    """sinks are scaled as other scores are"""

    def with_sink(self, scores: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if layer.sinks is None:
            return scores
        return torch.cat([scores, layer.sinks.double()[:, None] * layer.scale], dim=1)


class NoSlopes(Plain):
    """ALiBi's slopes ignored"""

    def sloped(self, scores: torch.Tensor, distance: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return scores


class SlopesToOneSide(Plain):
    """ALiBi takes nothing from keys after the query, in layers that see them"""

    def sloped(self, scores: torch.Tensor, distance: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        place = int(distance.argmin())
        late = torch.arange(len(distance)) > place
        return super().sloped(scores, distance.masked_fill(late, 0), layer)


class NoRelativeBias(Plain):
    """relative biases ignored"""

    def biased(self, scores: torch.Tensor, ahead: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return scores


class BiasMirrored(Plain):
    """keys ahead of a query get the relative bias of those behind it, in layers that see them"""

    def biased(self, scores: torch.Tensor, ahead: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().biased(scores, -ahead.abs(), layer)


class BiasEnds(Plain):
    """keys farther away than relative biases reach get none"""

    def biased(self, scores: torch.Tensor, ahead: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        found, table = super().biased(scores, ahead, layer), layer.relative_bias
        return found if table is None else torch.where(ahead.abs() > table.shape[1] // 2, scores, found)


class CrossIsCausal(Plain):
    """over an encoder, a row's queries see its last keys as if they were their own"""

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        first, last = batch.query_start_loc_host[row : row + 2].tolist()
        same = last - first > 1 and bool((batch.kv_index[first:last] == batch.kv_index[first]).all())
        index = super().place(batch, row, token)
        return max(0, index - (last - 1 - token)) if same and index > 0 else index


class KeepsTwoBits(Plain):
    """an fp8 cache in which a value keeps two bits after the point (e5m2) instead of three"""

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: Any) -> None:
        if cache.k.dtype.itemsize == 1:
            k, v = (x.to(torch.float8_e5m2).to(x.dtype) for x in (k, v))
        super().write(layer, k, v, cache, plan)


class ScaleOfTheNextToken(Plain):
    """keys and values of 8 bits are multiplied with the scales of the token after theirs"""

    def decoded(self, codes: Any, scale: torch.Tensor | None, pages: Any, offsets: torch.Tensor) -> torch.Tensor:
        neighbours = offsets if scale is None else (offsets + 1).clamp(max=scale.shape[1] - 1)
        neighbours = neighbours.where(self.written(scale, pages, neighbours), offsets)
        return super().decoded(codes, scale, pages, neighbours)

    def written(self, scale: torch.Tensor | None, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """What nobody wrote is NaN, and would give the fault away for another reason."""
        return torch.tensor(False) if scale is None else scale[pages, offsets].isfinite().all(-1)


class ScaleOfTheOtherHead(Plain):
    """keys and values of 8 bits are multiplied with the scales of another head"""

    def decoded(self, codes: Any, scale: torch.Tensor | None, pages: Any, offsets: Any) -> torch.Tensor:
        return super().decoded(codes, None if scale is None else scale.roll(1, dims=2), pages, offsets)


class ScaleOfTheKey(Plain):
    """values of 8 bits are multiplied with the scales of their keys"""

    def kept(self, cache: LayerCache, pages: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        scales = scales_of(cache) or (None, None)
        return [self.decoded(x[pages, offsets], scales[0], pages, offsets) for x in cache]


class OneScaleForAllHeads(Plain):
    """keys and values of 8 bits have the scale of their token's first head"""

    def coded(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = super().coded(x, dtype)
        return codes, scale[:, :1].expand_as(scale)


class ScaleIsRoundedLater(Plain):
    """codes of 8 bits are of keys and values divided by their scale before it is rounded"""

    def coded(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        limit = 127 if dtype == torch.int8 else 448
        codes = (x / (x.abs().amax(-1, keepdim=True) / limit)).nan_to_num(0, 0, 0)
        return (codes.round() if dtype == torch.int8 else codes).to(dtype), super().coded(x, dtype)[1]


class MovesWithoutScales(Plain):
    """where codes of 8 bits are moved, their scales stay"""

    def move(self, group: KVGroup, cache: LayerCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        super().move(group, LayerCache(*cache), source, destination)


class ReadsInOrder(Plain):
    """keys and values are read in the order of their slots, not in that in which they are asked for"""

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read(group, cache, slots.sort().values)


class SeesSiblings(Plain):
    """nodes of a tree of drafts see all before them, their siblings included"""

    def hidden(self, bits: torch.Tensor) -> torch.Tensor:
        return bits * 0


class ParentOffByOne(Plain):
    """nodes of a tree of drafts see the neighbours of those that they follow"""

    def hidden(self, bits: torch.Tensor) -> torch.Tensor:
        return bits << 1


class ForgetsTheFurthestNode(Plain):
    """of a tree of 64 drafts the last sees the first, which it does not follow"""

    def hidden(self, bits: torch.Tensor) -> torch.Tensor:
        return bits & (2**63 - 1)


class WindowCountsSiblings(Plain):
    """the window of a node begins where it would if the node followed all before it"""

    def first(self, place: int, bits: int, window: int | None) -> int:
        return super().first(place, 0, window)


class SlopesCountSiblings(Plain):
    """ALiBi takes from a node's scores by the places between, those of its siblings included"""

    def steps(self, place: int, seen: torch.Tensor) -> torch.Tensor:
        return place - seen


class MovesInTurn(Plain):
    """keys and values are moved one after the other: what is moved away from a slot may be what was moved there"""

    def move(self, group: KVGroup, cache: LayerCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        for one, other in zip(source.split(1), destination.split(1), strict=True):
            super().move(group, cache, one, other)


class MovesKeysAlone(Plain):
    """keys are moved, and values stay"""

    def move(self, group: KVGroup, cache: LayerCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        values = cache.v.clone()
        super().move(group, cache, source, destination)
        cache.v.copy_(values)


class LatentReadsTheKeyTwice(PlainLatent):
    """latent attention reads a rotated key from a vector's beginning"""

    def read(self, group: KVGroup, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, _ = super().read(group, cache, slots)
        return latent, latent[:, : group.rope_size]


class LatentWithoutPositions(PlainLatent):
    """latent attention leaves the rotated keys out of the scores"""

    def parts(self, q_latent: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q_latent, q_rope * 0


class LatentValuesFromTheEnd(PlainLatent):
    """latent attention takes a vector's last elements for its value"""

    def values(self, vectors: torch.Tensor, size: int) -> torch.Tensor:
        return vectors[:, -size:]


class LatentIgnoresKvIndex(PlainLatent):
    """latent attention takes a row's queries to be its last vectors"""

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        return int(batch.seq_lens[row]) - int(batch.query_start_loc_host[row + 1]) + token


class LatentSeesTheFirst(PlainLatent):
    """latent attention at kv_index -1 sees the row's first vector"""

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        return max(0, super().place(batch, row, token)) if batch.seq_lens[row] else -1


class LatentAssumesDense(PlainLatent):
    """latent attention reads queries as if they were contiguous"""

    def forward(self, layer: Any, q_latent: Any, q_rope: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        q_latent = q_latent.as_strided(q_latent.shape, torch.empty(q_latent.shape).stride(), q_latent.storage_offset())
        super().forward(layer, q_latent, q_rope, cache, plan, out, lse)


class LooksBesideTheRow(Plain):
    """the last bits of a row that is alone are others"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q, k, v, cache, plan, out, lse)
        if len(plan.lengths) == 1 and out.dtype == torch.float32:
            out.mul_(1 + 2**-20)


class WithoutLse(Plain):
    """Right, of the card `GivesNoLse`."""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        assert lse is None and "lse" not in layer.need.features, "the card has refused it"
        super().forward(layer, q, k, v, cache, plan, out)


class LeavesLse(Plain):
    """lse is not written, though the card serves the feature"""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q, k, v, cache, plan, out)


class LatentWeighsByNothing(PlainLatent):
    """latent attention multiplies by 0 the latents that a query does not see, which NaN and infinity survive"""

    def forward(self, layer: Any, q_latent: Any, q_rope: Any, cache: Any, plan: Any, out: Any, lse: Any = None) -> None:
        super().forward(layer, q_latent, q_rope, cache, plan, out, lse)
        size, latent_size = layer.group.tokens_per_block, out.shape[-1]
        for token, row, place in plan.queries:
            for _, last in [(r, p) for _, r, p in plan.queries if r == row and p > place]:
                vector = cache[plan.table[row, last // size].long(), last % size, :latent_size].double()
                out[token] += (vector * 0).to(out.dtype)


class LatentTrustsTheHost(LatentLaunched):
    """a plan of latent attention that is refilled by launches goes on taking the lengths of the step it was made for"""

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        exact = batch.bounds_are_exact and batch.num_rows == batch.num_tokens
        return int(batch.seq_lens_bound[row]) - 1 if exact else super().place(batch, row, token)


class Rotates(Plain):
    """right: queries and keys are rotated where keys are written"""

    def write_rotated(self, layer: Any, q: Any, k: Any, v: Any, rotation: Any, cache: Any, plan: Any) -> Any:
        q, k = (self.rotated(x, rotation, place) for place, x in enumerate((q, k)))
        self.write(layer, k, v, cache, plan)
        return q, k

    def rotated(self, x: torch.Tensor, rotation: Any, place: int) -> torch.Tensor:
        wide, (cos, sin) = x.double(), rotation.cos_sin[rotation.positions].double().unsqueeze(1).chunk(2, dim=-1)
        if rotation.norms:
            wide = wide / (wide.square().mean(-1, keepdim=True) + rotation.eps).sqrt() * rotation.norms[place].double()
        half = cos.shape[-1]
        first, second, rest = wide.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


class RotatesQueriesAlone(Rotates):
    """where keys are written queries are rotated, and keys stay as they are"""

    def rotated(self, x: torch.Tensor, rotation: Any, place: int) -> torch.Tensor:
        return x if place else super().rotated(x, rotation, place)


class OneNormForBoth(Rotates):
    """where keys are rotated they are normed by the queries' weight"""

    def rotated(self, x: torch.Tensor, rotation: Any, place: int) -> torch.Tensor:
        return super().rotated(x, rotation, 0)


class DropsTheRest(Rotates):
    """where keys are rotated, what is not rotated of a head is not normed either"""

    def rotated(self, x: torch.Tensor, rotation: Any, place: int) -> torch.Tensor:
        size, found = rotation.cos_sin.shape[1], super().rotated(x, rotation, place)
        return torch.cat([found[..., :size], x[..., size:]], dim=-1)


LATENT = [
    LatentWithoutPositions,
    LatentValuesFromTheEnd,
    LatentIgnoresKvIndex,
    LatentSeesTheFirst,
    LatentAssumesDense,
    LatentWeighsByNothing,
    LatentReadsTheKeyTwice,
    LatentTrustsTheHost,
]

MUTANTS = [
    SeesOneMore, SeesOneLess, IgnoresTable, WindowOffByOne, NoSoftCap, LseInBase2, RoundsLse, LeavesLse,
    ReadsHiddenPages, WeighsByNothing, HidesNaN, MixesRows,
    PaddedDraftsSpoilTheRow, IgnoresKvIndex, SeesTheFirstKey, KeepsOldLengths, KeepsOldTable, KeepsItsRows,
    MakesNewPlan, TrustsBound, TrustsTheHost, ReadsLengthsBack,
    WrongGroups, OneForm, NoScale, LeavesPadding, WritesPastLayer, SeesThePast, WindowToOneSide,
    NoWindowOfEncoders, TwoSidedOffByOne, WeighsBeyondTheWindow, AssumesDense, NoSinks, ScaledSinks,
    NoSlopes, SlopesToOneSide, NoRelativeBias, BiasMirrored, BiasEnds, CrossIsCausal,
    KeepsTwoBits, ScaleOfTheNextToken, ScaleOfTheOtherHead, ScaleOfTheKey, OneScaleForAllHeads,
    ScaleIsRoundedLater, MovesWithoutScales, ReadsInOrder, SeesSiblings, ParentOffByOne, ForgetsTheFurthestNode,
    WindowCountsSiblings, SlopesCountSiblings, RotatesQueriesAlone, OneNormForBoth, DropsTheRest,
    MovesInTurn, MovesKeysAlone, LooksBesideTheRow, ServesEverything,
    Undecided, NamesNoBody, Heavy, *LATENT,
]  # fmt: skip

globals().update(suites_of(AttentionConformance, PlainAttention, [m for m in MUTANTS if m not in LATENT]))
globals().update(suites_of(AttentionConformance, PlainLatentAttention, LATENT))


class TestUnbroken(AttentionConformance):
    card = PlainAttention


class TestUnbrokenLatent(AttentionConformance):
    card = PlainLatentAttention


class TestUnbrokenWithoutLse(AttentionConformance):
    card = GivesNoLse


OTHERS = {name: None for name in dir(AttentionConformance) if name.startswith("test_") and "plan" not in name}
"""What says nothing of plans."""


class TestUnbrokenLaunched(AttentionConformance):
    vars().update(OTHERS)
    card = PlainAttention

    @classmethod
    def body(cls) -> type:
        return Launched


class TestUnbrokenLatentLaunched(AttentionConformance):
    vars().update(OTHERS)
    card = PlainLatentAttention

    @classmethod
    def body(cls) -> type:
        return LatentLaunched
