"""Attention in float64, and paged batches to compare drivers on. What no query may see is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed
from engine.types.kv import KVGroup
from engine_reference.attention_torch.attention import coded


@dataclass(frozen=True)
class Form:
    """What one kind of layer looks like."""

    heads: int = 2
    group: int = 2
    size: int = 16
    block: int = 16
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None

    @property
    def stored(self) -> torch.dtype:
        """The cache's type."""
        return self.kv_dtype or self.dtype


def text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_driver(level: str) -> Any:
    """The native driver, forced to one level."""
    from engine_cpu.attention_cpu.body import CpuAttentionBody
    from engine_cpu.attention_cpu.card import CpuAttentionOptions

    return CpuAttentionBody(SimpleNamespace(options=CpuAttentionOptions(level=level)))  # type: ignore[arg-type]


@dataclass
class Row:
    """One row's keys and values, [S, heads, size] as they are written, its queries, and their places among them.

    Args:
        codes: of a cache of 8 bits; what attention computes with is then what the reference driver's codes stand for.
    """

    index: list[int]
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    codes: torch.dtype | None = None

    @classmethod
    def random(cls, form: Form, index: list[int], seed: int) -> Row:
        generator = torch.Generator().manual_seed(seed)
        codes = form.stored if form.stored.itemsize == 1 else None

        def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            drawn = torch.randn(*shape, dtype=torch.float64, generator=generator)
            if codes is not None and dtype == codes:  # of very different sizes
                drawn *= 2 ** torch.randint(-4, 2, (*shape[:2], 1), generator=generator)
                dtype = form.dtype
            return drawn.to(form.dtype).to(dtype)

        kv = (max(index) + 1, form.heads, form.size)
        return cls(
            index,
            normal(*kv, dtype=form.stored),
            normal(*kv, dtype=form.stored),
            normal(len(index), form.heads * form.group, form.size, dtype=form.dtype),
            codes,
        )

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values as the cache holds them, in float64."""
        if self.codes is None:
            return x.double()
        codes, scales = coded(x, self.codes)
        return codes.double() * scales.double().unsqueeze(-1)

    def seen(self, window: int | None) -> np.ndarray:
        """bool [queries, keys]."""
        index, key = np.array(self.index)[:, None], np.arange(len(self.k))
        seen = key <= index
        return seen if window is None else seen & (key > index - window)

    def expected(self, layer: AttentionLayer, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """out [n, Hq, D], lse [n, Hq] in float64; `whole`: every query sees every key."""
        q, k, v = self.q.double(), self.kept(self.k), self.kept(self.v)
        q = q.unflatten(1, (layer.need.num_kv_heads, -1))  # [n, heads, group, size]
        scores = torch.einsum("nhgd,shd->nhgs", q, k).flatten(1, 2) * layer.scale
        if layer.need.soft_cap is not None:
            scores = layer.need.soft_cap * torch.tanh(scores / layer.need.soft_cap)
        if layer.alibi_slopes is not None:
            away = (torch.tensor(self.index)[:, None] - torch.arange(len(k))).abs()
            scores = scores - layer.alibi_slopes.double()[:, None] * away[:, None]
        if not whole:
            seen = torch.from_numpy(self.seen(layer.group.sliding_window))
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            v = v.masked_fill(~seen.any(dim=0)[:, None, None], 0)
        lse = torch.logsumexp(scores, dim=-1)
        if layer.sinks is not None:
            lse = torch.logaddexp(lse, layer.sinks.double())
        weights = torch.exp(scores - lse.unsqueeze(-1)).unflatten(1, (layer.need.num_kv_heads, -1))
        return torch.einsum("nhgs,shd->nhgd", weights, v).flatten(1, 2), lse


@dataclass
class Case:
    """A batch of rows in a pool of pages.

    Args:
        padding_rows: rows of one token each, on the null page, as a bucket has them.
        padding_tokens: tokens behind all rows.
    """

    form: Form
    rows: list[Row]
    padding_rows: int = 0
    padding_tokens: int = 0
    seed: int = 0
    pool: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        form, generator = self.form, np.random.default_rng(self.seed)
        scale = 2 if form.stored.itemsize == 1 else 0
        layer_bytes = 2 * form.heads * form.block * (form.size * form.stored.itemsize + scale)
        self.group = KVGroup(
            index=0, kind="full" if form.window is None else "sliding", sites=(0, 1), num_kv_heads=form.heads,
            head_size=form.size, sliding_window=form.window, tokens_per_block=form.block, layer_bytes=layer_bytes,
        )  # fmt: skip
        heads = form.heads * form.group
        need = AttentionNeed(
            kind=self.group.kind, head_size=form.size, num_q_heads=heads, num_kv_heads=form.heads,
            dtype=text(form.dtype), kv_dtype=text(form.stored), device="cpu", block_size=form.block,
            sliding_window=form.window, soft_cap=form.cap,
            features=frozenset({"kv_index", *["sinks"] * form.sinks, *["alibi"] * form.alibi}),
        )  # fmt: skip
        self.layer = AttentionLayer(
            index=1, group=self.group, need=need, scale=form.size**-0.5,
            sinks=torch.linspace(-2, 3, heads) if form.sinks else None,
            alibi_slopes=2.0 ** -torch.linspace(1, 8, heads) if form.alibi else None,
        )  # fmt: skip
        blocks = [-(-len(row.k) // form.block) for row in self.rows]
        self.pool = torch.full((sum(blocks) + 2, 2 * layer_bytes), 255, dtype=torch.uint8)  # NaN of any float
        free = (generator.permutation(sum(blocks) + 1) + 1).tolist()
        poison = free.pop()
        padded = len(self.rows) + self.padding_rows
        table = np.full((padded, max(blocks) + 1), poison, np.int32)
        table[len(self.rows) :] = 0
        slots, self._old = [], []
        for r, row in enumerate(self.rows):
            table[r, : blocks[r]] = [free.pop() for _ in range(blocks[r])]
            seen = row.seen(form.window).any(axis=0)
            place = np.arange(len(row.k))
            slot = table[r, place // form.block].astype(np.int64) * form.block + place % form.block
            slots += slot[row.index].tolist()
            old = seen.copy()
            old[row.index] = False
            self._old.append((slot[old], row.k[old], row.v[old]))
            for block in range(blocks[r]):
                if not seen[block * form.block : (block + 1) * form.block].any():
                    table[r, block] = poison  # it left the window: the entry is stale
        counts = [len(row.index) for row in self.rows] + [1] * self.padding_rows
        self.num_real = len(slots)
        extra = self.padding_rows + self.padding_tokens
        start = np.append(0, np.cumsum(counts)).astype(np.int32)
        lengths = np.array([len(row.k) for row in self.rows] + [1] * self.padding_rows, np.int32)
        self.batch = AttentionBatch(
            num_rows=padded, num_tokens=self.num_real + extra, num_decodes=sum(n == 1 for n in counts),
            query_start_loc=torch.from_numpy(start), query_start_loc_host=start, seq_lens=torch.from_numpy(lengths),
            seq_lens_bound=lengths, block_table=torch.from_numpy(table),
            slot_mapping=torch.tensor(slots + [0] * extra),
            kv_index=torch.tensor([i for row in self.rows for i in row.index] + [0] * extra),
        )  # fmt: skip

        def joined(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([*parts, torch.ones(extra, *parts[0].shape[1:], dtype=form.dtype)])

        self.q = joined([row.q for row in self.rows])
        self.k, self.v = (
            joined([getattr(row, name)[row.index].to(form.dtype) for row in self.rows]) for name in ("k", "v")
        )

    def start(self, body: Any) -> tuple[Any, Any]:
        """The layer's cache with what earlier steps wrote into it, and the plan of this step."""
        dtype, layer_bytes = self.form.dtype, self.group.layer_bytes
        cache = body.cache(self.layer.need, self.group, self.pool[:, layer_bytes:])
        for slot, k, v in self._old:
            if len(slot):
                start = np.array([0, len(slot)], np.int32)
                earlier = AttentionBatch(
                    num_rows=1, num_tokens=len(slot), num_decodes=0, query_start_loc=torch.from_numpy(start),
                    query_start_loc_host=start, seq_lens=torch.tensor([len(slot)], dtype=torch.int32),
                    seq_lens_bound=np.array([len(slot)], np.int32), block_table=self.batch.block_table[:1],
                    slot_mapping=torch.from_numpy(slot), kv_index=torch.arange(len(slot)),
                )  # fmt: skip
                body.write(self.layer, k.to(dtype), v.to(dtype), cache, body.plan(earlier, self.group))
        return cache, body.plan(self.batch, self.group)

    def run(self, body: Any, record: Callable[[Callable[[], None]], None] | None = None) -> tuple[Any, Any]:
        """out [T, Hq, D], lse [T, Hq]; `record` is given what launches the step."""
        cache, plan = self.start(body)
        out, lse = torch.full_like(self.q, torch.nan), torch.full(self.q.shape[:2], torch.nan)

        def launch() -> None:
            body.write(self.layer, self.k, self.v, cache, plan)
            body.forward(self.layer, self.q, self.k, self.v, cache, plan, out, lse)

        launch() if record is None else record(launch)
        return out, lse

    def check(self, body: Any, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the driver with float64; what it gave."""
        out, lse = self.run(body)
        expected = [row.expected(self.layer) for row in self.rows]
        wanted, sums = (torch.cat(parts) for parts in zip(*expected, strict=True))
        torch.testing.assert_close(out[: self.num_real].double(), wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[: self.num_real].double(), sums, rtol=2e-5, atol=2e-5)
        assert out.isfinite().all() and lse.isfinite().all()
        return out, lse
