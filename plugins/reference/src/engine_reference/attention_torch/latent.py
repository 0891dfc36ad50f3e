"""The body of the reference latent attention (kind "mla").

A page of a layer holds its tokens' vectors one after another, [tokens_per_block, C + P]: the latent, then the rotated
key. A query is the concatenation (q_latent, q_rope), so a score is one product with a cached vector, and the value is
that vector's first C elements. Scores are computed in float32 at least. All heads share the vectors of a row, which
are gathered once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel
from engine.types.kv import KVGroup
from engine_reference.attention_torch.attention import MAX_SCORES, scores_of, see_nothing, stored, weights_of
from engine_reference.attention_torch.plan import DecodeChunk, PrefillRow, TorchPlan

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class TorchLatentAttentionBody:
    """Paged latent attention with any `kv_index`."""

    capture_level: CaptureLevel = "none"
    """A plan's shapes follow the lengths of the step, so what it launches cannot be replayed for the next one."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> torch.Tensor:
        """A view [num_pages, tokens_per_block, C + P] of uint8 pages [num_pages, layer_bytes]."""
        dtype: torch.dtype = getattr(torch, need.kv_dtype)
        elements = group.tokens_per_block * group.head_size
        return pages[:, : elements * dtype.itemsize].view(dtype).unflatten(1, (group.tokens_per_block, -1))

    def plan(self, batch: AttentionBatch, group: KVGroup, out: TorchPlan | None = None) -> TorchPlan:
        """The step's pages and masks, which all layers of the group share."""
        plan = TorchPlan() if out is None else out
        plan.fill(batch, group)
        return plan

    def write(
        self, layer: AttentionLayer, latent: torch.Tensor, rope_key: torch.Tensor, cache: torch.Tensor, plan: TorchPlan
    ) -> None:
        """Store latent [T, C] and rope_key [T, P], see `stored`."""
        del layer
        keys, values = stored(rope_key, latent, cache.dtype)
        cache[plan.page, plan.offset] = torch.cat((values, keys), dim=-1)

    def read(self, group: KVGroup, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.latent_attention.LatentAttentionBackend.read`."""
        vectors = cache[slots // group.tokens_per_block, slots % group.tokens_per_block]
        return vectors[:, : -group.rope_size], vectors[:, -group.rope_size :]

    def forward(
        self,
        layer: AttentionLayer,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        cache: torch.Tensor,
        plan: TorchPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `engine.interfaces.latent_attention.LatentAttentionBackend.forward`."""
        q = torch.cat((q_latent, q_rope), dim=-1)
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
    cache: torch.Tensor,
    chunk: DecodeChunk,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    rows = slice(chunk.start, chunk.stop)
    vectors = _gather(cache, chunk.pages, q.dtype).view(chunk.stop - chunk.start, -1, q.shape[-1])[:, : chunk.num_keys]
    scores = scores_of(layer, q[rows], vectors)
    if chunk.hidden is not None:
        scores.masked_fill_(chunk.hidden.unsqueeze(1), -torch.inf)
        # Hidden keys have weight 0, but 0 * NaN would still spoil the sum.
        vectors.masked_fill_(chunk.hidden.unsqueeze(2), 0)
    blind = None if chunk.blind is None else chunk.blind.unsqueeze(1)
    weights, total = weights_of(scores, None, lse is not None, blind)
    out[rows] = torch.bmm(weights, vectors[..., : out.shape[-1]])
    if lse is not None and total is not None:
        lse[rows] = total


def _prefill(
    layer: AttentionLayer,
    q: torch.Tensor,
    cache: torch.Tensor,
    row: PrefillRow,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    num_heads, per_block = q.shape[1], layer.group.tokens_per_block
    at_once = max(1, MAX_SCORES // max(1, num_heads * len(row.table) * per_block))
    for start in range(row.start, row.stop, at_once):
        stop = min(start + at_once, row.stop)
        index = row.kv_index[start - row.start : stop - row.start]
        lowest, highest = (int(bound) for bound in index.aminmax())
        if highest < 0:
            see_nothing(out[start:stop], None if lse is None else lse[start:stop], None)
            continue
        pages = row.table[: highest // per_block + 1]
        vectors = _gather(cache, pages, q.dtype).flatten(0, 1)[: highest + 1]
        # [heads * queries, C + P]: every head's queries against the same vectors
        queries = q[start:stop].transpose(0, 1).reshape(1, -1, q.shape[-1])
        scores = scores_of(layer, queries, vectors.unsqueeze(0)).view(num_heads, stop - start, highest + 1)
        scores.masked_fill_(torch.arange(highest + 1, device=q.device) > index.unsqueeze(1), -torch.inf)
        weights, total = weights_of(scores, None, lse is not None, index < 0 if lowest < 0 else None)
        out[start:stop] = (weights @ vectors[:, : out.shape[-1]]).transpose(0, 1)
        if lse is not None and total is not None:
            lse[start:stop] = total.T


def _gather(cache: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[len(pages), tokens_per_block, C + P], in float32 at least."""
    return cache.index_select(0, pages).to(torch.float64 if dtype == torch.float64 else torch.float32)
