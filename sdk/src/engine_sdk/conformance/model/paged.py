"""Paged attention for a model under test: the reference driver's, over pools in which what is not written is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from engine.interfaces.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionNeed, LayerCache
from engine.interfaces.context import WorkerContext
from engine.plugin import Registry, load_body
from engine.types.kv import KVGroup, kv_heads_on_rank
from engine.types.model import KVSpec, ModelDescription

BLOCK = 4
"""Tokens to a page: few, so that short prompts have several."""
MAX_TOKENS = 640
"""Of all requests of a session together."""


@dataclass
class Request:
    """One sequence: how much of it is computed, and its pages in each group."""

    computed: int = 0
    pages: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """A row of a step: `length` tokens of a request, after those that are computed."""

    request: Request
    length: int


class _Layer:
    """One layer's attention. Implements `engine.interfaces.model.PagedAttention`, and looks at what it is given."""

    def __init__(self, owner: PagedLayers, layer: AttentionLayer, cache: LayerCache | None) -> None:
        self._owner, self._layer, self._cache = owner, layer, cache

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        owner, layer, need = self._owner, self._layer, self._layer.need
        what = f"attention of layer {layer.index} is given"
        tokens, kv_form = owner.num_tokens, (owner.num_tokens, need.num_kv_heads, need.head_size)
        assert tuple(q.shape) == (tokens, need.num_q_heads, need.head_size), f"{what} q {list(q.shape)}"
        assert tuple(k.shape) == kv_form and tuple(v.shape) == kv_form, f"{what} k {list(k.shape)}, v {list(v.shape)}"
        assert {q.dtype, k.dtype, v.dtype} == {owner.dtype}, f"{what} {q.dtype}, {k.dtype} and {v.dtype}"
        owner.calls.append(layer.index)
        plan = owner.plans[layer.group.index]
        cache = self._cache or LayerCache(k[:0], v[:0])
        if self._cache is not None:
            owner.backend.write(layer, k, v, cache, plan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        owner.backend.forward(layer, q, k, v, cache, plan, out)
        if owner.keeps:
            owner.kept += [q.clone(), k.clone(), v.clone()]
        return out.flatten(1)


class PagedLayers:
    """All attention of one rank. Implements `engine.interfaces.model.AttentionFactory`.

    Args:
        backend: the reference driver's body.
        size: ranks that share the layers.
        keeps: keep what the layers are given.

    Attributes:
        calls: the layers that were called, in order.
        kept: queries, keys and values of each call, where they are kept.
    """

    def __init__(
        self, model: ModelDescription, context: WorkerContext, backend: AttentionBackend, size: int, keeps: bool = False
    ) -> None:
        assert context.device is not None and context.dtype is not None
        self.backend, self.dtype, self.device, self.keeps = backend, context.dtype, context.device, keeps
        self.calls: list[int] = []
        self.kept: list[torch.Tensor] = []
        self.built: list[int] = []
        self.features: set[str] = set()
        self.plans: list[Any] = []
        self.num_tokens = 0
        self.needs = attention_needs(model, str(self.dtype).removeprefix("torch."), str(self.device), size)
        specs = list(dict.fromkeys(model.kv_specs))
        self.groups = tuple(
            _group(index, spec, model.kv_specs, self.needs[index], self.dtype.itemsize)
            for index, spec in enumerate(specs)
        )
        pages = MAX_TOKENS // BLOCK + 1
        self._pools = []
        for group in self.groups:
            pool = torch.zeros(pages, group.layer_bytes * len(group.layers), dtype=torch.uint8)
            if group.layer_bytes:
                pool.view(self.dtype).fill_(torch.nan)
            self._pools.append(pool.to(self.device))
        shuffled = np.random.default_rng(0).permutation(pages - 1) + 1
        self._free = [shuffled.tolist() for _ in self.groups]

    def __call__(
        self,
        layer: int,
        scale: float,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> _Layer:
        """The attention of the model's layer of this index."""
        group = next((group for group in self.groups if layer in group.layers), None)
        assert group is not None, f"the model asks for attention of layer {layer}, which its description has not"
        self.built.append(layer)
        self.features |= {name for name, given in (("sinks", sinks), ("alibi", alibi_slopes)) if given is not None}
        made = AttentionLayer(
            index=layer, group=group, need=self.needs[group.index], scale=scale, sinks=sinks, alibi_slopes=alibi_slopes
        )
        if group.kind == "encoder":
            return _Layer(self, made, None)
        start = group.layers.index(layer) * group.layer_bytes
        pages = self._pools[group.index][:, start : start + group.layer_bytes]
        return _Layer(self, made, self.backend.cache(made.need, group, pages))

    def plan(self, rows: Sequence[Chunk], padding_rows: int = 0, padding_tokens: int = 0) -> None:
        """Give the rows their pages, and prepare the step. Rows of one token that come first are decodes.

        padding_rows: of one token each, behind the rows; padding_tokens: behind all rows.
        """
        decodes = next((i for i, row in enumerate(rows) if row.length != 1), len(rows))
        counts = [row.length for row in rows] + [1] * padding_rows
        lengths = [row.request.computed + row.length for row in rows] + [1] * padding_rows
        index = [i for row in rows for i in range(row.request.computed, row.request.computed + row.length)]
        index += [0] * (padding_rows + padding_tokens)
        self.num_tokens = len(index)
        start = np.cumsum([0, *counts]).astype(np.int32)
        self.plans = []
        for group in self.groups:
            table, slots = self._places(group, rows, padding_rows)
            slots += [0] * (len(index) - len(slots))
            batch = AttentionBatch(
                num_rows=len(counts),
                num_tokens=len(index),
                num_decodes=decodes + (padding_rows if decodes == len(rows) else 0),
                query_start_loc=torch.from_numpy(start.copy()).to(self.device),
                query_start_loc_host=start,
                seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
                seq_lens_bound=np.array(lengths, np.int32),
                block_table=torch.from_numpy(table).to(self.device),
                slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
                kv_index=torch.tensor(index, dtype=torch.int64, device=self.device),
            )
            self.plans.append(self.backend.plan(batch, group))
        for row in rows:
            row.request.computed += row.length

    def release(self, request: Request) -> None:
        """Take its pages back, with what is in them: others get them as they are."""
        for free, pages in zip(self._free, request.pages, strict=False):
            free += pages
        request.pages, request.computed = [], 0

    def _places(self, group: KVGroup, rows: Sequence[Chunk], padding_rows: int) -> tuple[np.ndarray, list[int]]:
        """The group's block table, and where each token goes."""
        if group.kind == "encoder":
            assert all(not row.request.computed for row in rows), "an encoder's prompts are computed whole"
            return np.zeros((len(rows) + padding_rows, 0), np.int32), []
        per_block, slots, tables = group.tokens_per_block, [], []
        for row in rows:
            request = row.request
            request.pages += [[] for _ in range(len(self.groups) - len(request.pages))]
            pages, stop = request.pages[group.index], request.computed + row.length
            while len(pages) * per_block < stop:
                pages.append(self._free[group.index].pop())
            slots += [pages[p // per_block] * per_block + p % per_block for p in range(request.computed, stop)]
            tables.append(pages)
        width = max((len(pages) for pages in tables), default=1)
        table = np.zeros((len(rows) + padding_rows, width), np.int32)
        for place, pages in enumerate(tables):
            table[place, : len(pages)] = pages
        return table, slots


def attention_needs(model: ModelDescription, dtype: str, device: str, size: int) -> tuple[AttentionNeed, ...]:
    """What the model's layers ask of attention, for each form of their caches."""
    return tuple(
        AttentionNeed(
            kind=spec.kind,
            head_size=spec.head_size,
            num_q_heads=model.num_q_heads // size,
            num_kv_heads=kv_heads_on_rank(spec.num_kv_heads, size) if spec.num_kv_heads else 0,
            dtype=dtype,
            kv_dtype=dtype,
            device=device,
            block_size=BLOCK,
            sliding_window=spec.sliding_window,
            soft_cap=model.soft_cap,
            features=frozenset(model.attention_features),
        )
        for spec in dict.fromkeys(model.kv_specs)
    )


def reference_attention(context: WorkerContext, registry: Registry) -> AttentionBackend:
    """The reference driver's body."""
    return cast("AttentionBackend", load_body(registry.card(registry.find("attention", "torch")))(context))


def _group(index: int, spec: KVSpec, specs: Sequence[KVSpec], need: AttentionNeed, itemsize: int) -> KVGroup:
    elements = 0 if spec.kind == "encoder" else 2 * need.num_kv_heads * BLOCK * need.head_size
    return KVGroup(
        index=index,
        kind=spec.kind,
        layers=tuple(layer for layer, other in enumerate(specs) if other == spec),
        num_kv_heads=need.num_kv_heads,
        head_size=need.head_size,
        sliding_window=spec.sliding_window,
        tokens_per_block=BLOCK,
        layer_bytes=elements * itemsize,
    )
