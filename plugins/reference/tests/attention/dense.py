"""Dense attention in float64, and ragged paged batches to compare it on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed
from engine.interfaces.context import WorkerContext
from engine.types.kv import KVGroup
from engine_reference.attention_torch.attention import TorchAttentionBody


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    kv_index: np.ndarray,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One row: q [n, Hq, D], k and v [S, Hkv, D], kv_index [n] -> out [n, Hq, D], lse [n, Hq]. sinks, slopes [Hq]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat(repeat, axis=1), v.repeat(repeat, axis=1)
    scores = np.einsum("nhd,shd->nhs", q, k) * scale
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    key = np.arange(len(k))
    if slopes is not None:
        scores = scores - slopes[:, None] * np.abs(key - kv_index[:, None])[:, None]
    seen = key <= kv_index[:, None]
    if window is not None:
        seen &= key > kv_index[:, None] - window
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - top)
    return np.einsum("nhs,shd->nhd", weights / total, v), (top + np.log(total))[..., 0]


@dataclass
class Shape:
    """What one kind of layer looks like."""

    heads: int = 2
    group: int = 2
    size: int = 8
    block: int = 4
    window: int | None = None
    cap: float | None = None
    layers: int = 2
    spare_bytes: int = 64
    dtype: torch.dtype = torch.float64
    cache_dtype: torch.dtype | None = None
    sinks: bool = False
    alibi: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The cache's type."""
        return self.cache_dtype or self.dtype


class Case:
    """Rows with keys in a paged pool: everything that no query may see is NaN.

    Args:
        rows: for each row its kv_index, ascending. The last one's keys are in the row, all of them.
        num_decodes: the first rows, with one query each.
        padding: tokens after the last row.
        bound: how much `seq_lens_bound` says too much.
    """

    def __init__(
        self, shape: Shape, rows: list[list[int]], num_decodes: int, seed: int = 0, padding: int = 0, bound: int = 0
    ) -> None:
        self.shape = shape
        self.rows = rows
        self.num_decodes = num_decodes
        generator = np.random.default_rng(seed)
        lengths = np.array([row[-1] + 1 for row in rows], np.int32)
        blocks = [-(-int(n) // shape.block) for n in lengths]
        counts = [len(row) for row in rows]
        kv_bytes = 2 * shape.heads * shape.block * shape.size * shape.stored.itemsize
        self.group = KVGroup(
            index=0,
            kind="full" if shape.window is None else "sliding",
            sites=tuple(range(shape.layers)),
            num_kv_heads=shape.heads,
            head_size=shape.size,
            sliding_window=shape.window,
            tokens_per_block=shape.block,
            layer_bytes=kv_bytes,
        )
        name = str(shape.dtype).removeprefix("torch.")
        self.need = AttentionNeed(
            kind=self.group.kind,
            head_size=shape.size,
            num_q_heads=shape.heads * shape.group,
            num_kv_heads=shape.heads,
            dtype=name,
            kv_dtype=str(shape.stored).removeprefix("torch."),
            device="cpu",
            block_size=shape.block,
            sliding_window=shape.window,
            soft_cap=shape.cap,
            features=frozenset({"kv_index", *["sinks"] * shape.sinks, *["alibi"] * shape.alibi}),
        )
        count = shape.heads * shape.group
        sinks, slopes = torch.linspace(-2, 3, count), 2.0 ** -torch.arange(1, count + 1)
        self.layer = AttentionLayer(
            index=1,
            group=self.group,
            need=self.need,
            scale=shape.size**-0.5,
            sinks=sinks if shape.sinks else None,
            alibi_slopes=slopes if shape.alibi else None,
        )
        num_pages = 2 + sum(blocks)
        pool = torch.zeros(num_pages, shape.layers * kv_bytes + shape.spare_bytes, dtype=torch.uint8)
        self.pool = pool
        every = pool[:, : shape.layers * kv_bytes].view(shape.stored)
        every.fill_(torch.nan)
        self.pages = pool[:, kv_bytes : 2 * kv_bytes]
        self.k = [generator.normal(size=(int(n), shape.heads, shape.size)) for n in lengths]
        self.v = [generator.normal(size=(int(n), shape.heads, shape.size)) for n in lengths]
        self.q = torch.from_numpy(
            generator.normal(size=(sum(counts) + padding, shape.heads * shape.group, shape.size))
        ).to(shape.dtype)
        free = (generator.permutation(num_pages - 1) + 1).tolist()
        poison = free.pop()
        table = np.full((len(rows), max(blocks) + 2), poison, np.int32)
        old_slots, old_k, old_v, slots = [], [], [], []
        for r, row in enumerate(rows):
            for b in range(blocks[r]):
                table[r, b] = free.pop()
            seen = np.zeros(int(lengths[r]), bool)
            for index in row:
                seen[0 if shape.window is None else max(0, index - shape.window + 1) : index + 1] = True
            for position in range(int(lengths[r])):
                slot = int(table[r, position // shape.block]) * shape.block + position % shape.block
                if position in row:
                    slots.append(slot)
                elif seen[position]:
                    old_slots.append(slot)
                    old_k.append(self.k[r][position])
                    old_v.append(self.v[r][position])
            for b in range(blocks[r]):
                if not seen[b * shape.block : (b + 1) * shape.block].any():
                    table[r, b] = poison  # it left the window: the entry is stale
        self.new_k = torch.from_numpy(self._new(self.k, padding)).to(shape.dtype)
        self.new_v = torch.from_numpy(self._new(self.v, padding)).to(shape.dtype)
        start = np.cumsum([0, *counts]).astype(np.int32)
        self.batch = AttentionBatch(
            num_rows=len(rows),
            num_tokens=sum(counts) + padding,
            num_decodes=num_decodes,
            query_start_loc=torch.from_numpy(start),
            query_start_loc_host=start,
            seq_lens=torch.from_numpy(lengths),
            seq_lens_bound=lengths + np.int32(bound),
            block_table=torch.from_numpy(table),
            slot_mapping=torch.tensor(slots + [0] * padding),
            kv_index=torch.tensor([i for row in rows for i in row] + [0] * padding),
        )
        self.old = (old_slots, old_k, old_v)

    def _new(self, keys: list[np.ndarray], padding: int) -> np.ndarray:
        parts = [keys[r][row] for r, row in enumerate(self.rows)]
        return np.concatenate([*parts, np.ones((padding, *parts[0].shape[1:]))])

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, Hq, D], lse [T, Hq] of the driver."""
        dtype = self.shape.dtype
        body = TorchAttentionBody(WorkerContext(start=None, dtype=dtype))  # type: ignore[arg-type]
        cache = body.cache(self.need, self.group, self.pages)
        slots, k, v = self.old
        if slots:  # what earlier steps wrote, through `write` as well
            earlier = AttentionBatch(**{**vars(self.batch), "slot_mapping": torch.tensor(slots)})
            tensors = [torch.from_numpy(np.stack(x)).to(dtype) for x in (k, v)]
            body.write(self.layer, *tensors, cache, body.plan(earlier, self.group))
        plan = body.plan(self.batch, self.group)
        body.write(self.layer, self.new_k, self.new_v, cache, plan)
        out, lse = torch.full_like(self.q, torch.nan), torch.full(self.q.shape[:2], torch.nan)
        if dtype == torch.float64:
            lse = lse.double()
        body.forward(self.layer, self.q, self.new_k, self.new_v, cache, plan, out, lse)
        return out, lse

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The same of the real rows, dense."""
        outs, lses, start = [], [], 0
        sinks, slopes = (None if x is None else x.double().numpy() for x in (self.layer.sinks, self.layer.alibi_slopes))
        for r, row in enumerate(self.rows):
            q = self.q[start : start + len(row)].double().numpy()
            k, v = (
                torch.from_numpy(x[r]).to(self.shape.dtype).to(self.shape.stored).double().numpy()
                for x in (self.k, self.v)
            )
            out, lse = dense(q, k, v, np.array(row), self.layer.scale, self.shape.window, self.shape.cap, sinks, slopes)
            outs.append(out)
            lses.append(lse)
            start += len(row)
        return np.concatenate(outs), np.concatenate(lses)
