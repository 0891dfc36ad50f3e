"""A second driver of latent attention, written to be broken: one token after another, in float64."""

from __future__ import annotations

from typing import Any

import torch
from plain_attention import PlainPlan

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed
from engine.types.kv import KVGroup


class PlainLatent:
    """See `engine.interfaces.latent_attention.LatentAttentionBackend`."""

    capture_level = "none"

    def __init__(self, context: Any) -> None:
        del context

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, need.kv_dtype)
        used = pages[:, : group.tokens_per_block * group.head_size * dtype.itemsize]
        return used.view(dtype).unflatten(1, (group.tokens_per_block, group.head_size))

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        plan = PlainPlan() if out is None else out
        plan.slots = batch.slot_mapping
        plan.table = batch.block_table
        start = batch.query_start_loc_host
        plan.queries = [
            (token, row, self.place(batch, row, token))
            for row in range(batch.num_rows)
            for token in range(start[row], start[row + 1])
        ]
        return plan

    def place(self, batch: AttentionBatch, row: int, token: int) -> int:
        return int(batch.kv_index[token])

    def write(
        self, layer: AttentionLayer, latent: torch.Tensor, rope_key: torch.Tensor, cache: torch.Tensor, plan: Any
    ) -> None:
        size = layer.group.tokens_per_block
        cache[plan.slots // size, plan.slots % size] = torch.cat([latent, rope_key], dim=1).to(cache.dtype)

    def read(self, group: KVGroup, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = cache[slots // group.tokens_per_block, slots % group.tokens_per_block]
        return vectors[:, : -group.rope_size], vectors[:, -group.rope_size :]

    def forward(
        self,
        layer: AttentionLayer,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        out.zero_()
        if lse is not None:
            lse.zero_()
        size = layer.group.tokens_per_block
        for token, row, place in plan.queries:
            seen = torch.arange(place + 1)
            vectors = cache[plan.table[row, seen // size].long(), seen % size].double()
            query = torch.cat(self.parts(q_latent[token].double(), q_rope[token].double()), dim=1)
            scores = query @ vectors.T * layer.scale
            out[token] = (scores.softmax(-1) @ self.values(vectors, out.shape[-1])).to(out.dtype)
            if lse is not None:
                lse[token] = scores.logsumexp(-1)

    def parts(self, q_latent: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q_latent, q_rope

    def values(self, vectors: torch.Tensor, size: int) -> torch.Tensor:
        return vectors[:, :size]
