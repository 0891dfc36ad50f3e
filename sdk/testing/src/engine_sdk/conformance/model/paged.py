"""Paged attention for a model under test: the reference driver's, over pools in which what is not written is NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch, AttentionCard, AttentionLayer, AttentionNeed, LayerCache
from engine.interfaces.context import WorkerContext
from engine.plugin import Card, Registry, load_body
from engine.types.kv import KVGroup
from engine.types.model import KVSpec, ModelDescription
from engine_sdk.conformance.model.states import LentStates, state_batch

BLOCK = 4
"""Tokens to a page: few, so that short prompts have several."""
MAX_TOKENS = 640
"""Of all requests of a session together."""
MAX_ENCODED = 40
"""Tokens of one input to an encoder."""


@dataclass
class Request:
    """One sequence: how much of it is computed, its pages in each group, and where what its encoder left lies."""

    computed: int = 0
    source: int = 0
    pages: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """A row of a step: `length` tokens of a request, after those that are computed."""

    request: Request
    length: int


class _Layer:
    """One layer's attention. Implements `engine.interfaces.model.PagedAttention`, and looks at what it is given."""

    def __init__(self, owner: PagedLayers, layer: AttentionLayer, cache: Any) -> None:
        self._owner = owner
        self._layer = layer
        self._cache = cache
        self._backend: Any = owner.backends.get(layer.group.kind)

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
            self._backend.write(layer, k, v, cache, plan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._backend.forward(layer, q, k, v, cache, plan, out)
        if owner.keeps:
            owner.kept += [q.clone(), k.clone(), v.clone()]
        return out.flatten(1)


class _CrossLayer(_Layer):
    """What a decoder's layer sees of the encoder. Implements `engine.interfaces.model.PagedCrossAttention`."""

    def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        owner, layer, need = self._owner, self._layer, self._layer.need
        form, what = (owner.num_encoded, need.num_kv_heads, need.head_size), f"cross attention of layer {layer.index}"
        assert tuple(k.shape) == tuple(v.shape) == form, f"{what} is given k {list(k.shape)}, v {list(v.shape)}"
        self._backend.write(layer, k, v, self._cache, owner.plans[layer.group.index])

    def __call__(self, q: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        owner, layer, need = self._owner, self._layer, self._layer.need
        form, what = (owner.num_tokens, need.num_q_heads, need.head_size), f"cross attention of layer {layer.index}"
        assert tuple(q.shape) == form and q.dtype == owner.dtype, f"{what} is given q {list(q.shape)} of {q.dtype}"
        owner.calls.append(layer.index)
        out, none = torch.empty(q.shape, dtype=q.dtype, device=q.device), q[:0, : need.num_kv_heads]
        self._backend.forward(layer, q, none, none, self._cache, owner.plans[layer.group.index], out)
        return out.flatten(1)


class _LatentLayer(_Layer):
    """The same of a layer of kind "mla". Implements `engine.interfaces.model.PagedLatentAttention`."""

    def __call__(  # type: ignore[override]
        self, q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor
    ) -> torch.Tensor:
        owner, layer, need = self._owner, self._layer, self._layer.need
        tokens, sizes = owner.num_tokens, (need.head_size - need.rope_size, need.rope_size)
        given = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "rope_key": rope_key}
        forms = [(tokens, *([need.num_q_heads] if name < 2 else []), sizes[name % 2]) for name in range(4)]
        for (name, tensor), form in zip(given.items(), forms, strict=True):
            what = f"latent attention of layer {layer.index} is given {name}"
            assert tuple(tensor.shape) == form, f"{what} {list(tensor.shape)}, not {list(form)}"
            assert tensor.dtype == owner.dtype, f"{what} of {tensor.dtype}"
        owner.calls.append(layer.index)
        plan = owner.plans[layer.group.index]
        self._backend.write(layer, latent, rope_key, self._cache, plan)
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        self._backend.forward(layer, q_latent, q_rope, self._cache, plan, out)
        if owner.keeps:
            owner.kept += [tensor.clone() for tensor in given.values()]
        return out


class PagedLayers:
    """All attention of one rank. Implements `engine.interfaces.model.AttentionFactory`; `latent` is the factory of
    layers of kind "mla", `state` that of the states of those of kind "state".

    Args:
        backends: by kind of layer, the body of a reference driver.
        size: ranks that share the layers.
        keeps: keep what the layers are given.

    Attributes:
        calls: the layers that were called, in order.
        kept: what attention was given in each call, where it is kept.
    """

    def __init__(
        self,
        model: ModelDescription,
        context: WorkerContext,
        backends: Mapping[str, Any],
        size: int,
        keeps: bool = False,
    ) -> None:
        assert context.device is not None and context.dtype is not None
        self.backends = backends
        self.dtype = context.dtype
        self.device = context.device
        self.keeps = keeps
        self.calls: list[int] = []
        self.kept: list[torch.Tensor] = []
        self.built: list[int] = []
        self.features: set[str] = set()
        self.plans: list[Any] = []
        self.num_tokens = self.num_encoded = 0
        self._encodes = model.encoder is not None
        self.lengths: dict[int, int] = {}
        self.needs = attention_needs(model, str(self.dtype).removeprefix("torch."), str(self.device), size)
        self._sites = model.sites
        self.groups = tuple(
            _group(index, form, self._sites, self.needs[index], self.dtype.itemsize)
            for index, form in enumerate(forms(model))
        )
        pages = MAX_TOKENS // BLOCK + 1
        self._size = size
        self._pools = []
        for group in self.groups:
            pool = torch.zeros(pages, group.layer_bytes * len(group.sites), dtype=torch.uint8)
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
        relative_bias: torch.Tensor | None = None,
    ) -> _Layer:
        """The attention of the model's layer of this index."""
        group = self._group_of(layer)
        assert group.kind != "mla", f"layer {layer} is of kind 'mla', and asks for other attention"
        more = {"sinks": sinks, "alibi": alibi_slopes, "relative_bias": relative_bias}
        self.features |= {name for name, given in more.items() if given is not None}
        made = AttentionLayer(
            index=layer,
            group=group,
            need=self.needs[group.index],
            scale=scale,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            relative_bias=relative_bias,
        )
        if group.kind == "encoder":
            return _Layer(self, made, None)
        return _Layer(self, made, self._cache_of(made))

    def latent(self, layer: int, scale: float) -> _LatentLayer:
        """The attention of the model's layer of this index, which is of kind "mla"."""
        group = self._group_of(layer)
        assert group.kind == "mla", f"layer {layer} is of kind '{group.kind}', and asks for latent attention"
        made = AttentionLayer(index=layer, group=group, need=self.needs[group.index], scale=scale)
        return _LatentLayer(self, made, self._cache_of(made))

    def state(self, layer: int) -> LentStates:
        """The states of the model's layer of this index."""
        group = self._group_of(layer, "state")
        pages = MAX_TOKENS // BLOCK + 1
        return LentStates(self, layer, group.index, self._sites[group.sites[0]], self._size, pages)

    def cross(self, layer: int, scale: float) -> _CrossLayer:
        """The view that the model's decoder's layer of this index has of the encoder."""
        group = self._group_of(layer, "cross")
        made = AttentionLayer(index=layer, group=group, need=self.needs[group.index], scale=scale)
        return _CrossLayer(self, made, self._cache_of(made))

    def _group_of(self, layer: int, kind: str = "attention") -> KVGroup:
        beside = ("state", "cross")
        mine = (g for g in self.groups if (g.kind if g.kind in beside else "attention") == kind)
        group = next((g for g in mine if any(self._sites[site].layer == layer for site in g.sites)), None)
        assert group is not None, f"the model asks for {kind} of layer {layer}, which its description has not"
        self.built.append(layer)
        return group

    def _cache_of(self, layer: AttentionLayer) -> Any:
        group = layer.group
        start = [self._sites[site].layer for site in group.sites].index(layer.index) * group.layer_bytes
        pages = self._pools[group.index][:, start : start + group.layer_bytes]
        return self.backends[group.kind].cache(layer.need, group, pages)

    def begin_encoding(self, source: int, length: int) -> None:
        """Prepare attention for one input to the encoder, of so many tokens."""
        assert 0 < length <= MAX_ENCODED
        self.lengths[source] = length
        self.num_tokens = self.num_encoded = length
        self.plans = [None] * len(self.groups)
        starts, slots = np.array([0, length], np.int32), self._places_of(source, length)
        for group in self.groups:
            if group.kind in ("encoder", "cross"):
                self.plans[group.index] = self._planned(group, starts, [length], slots, list(range(length)), [source])

    def _places_of(self, source: int, length: int) -> list[int]:
        return [(1 + source * (MAX_ENCODED // BLOCK)) * BLOCK + place for place in range(length)]

    def _planned(
        self, group: KVGroup, starts: np.ndarray, lengths: list[int], slots: list[int], index: list[int],
        sources: list[int], decodes: int = 0,
    ) -> Any:  # fmt: skip
        """A plan over what encoders have left, or are to leave."""
        blocks = np.arange(MAX_ENCODED // BLOCK)
        table = (1 + np.array(sources)[:, None] * len(blocks) + blocks).astype(np.int32)
        batch = AttentionBatch(
            num_rows=len(lengths),
            num_tokens=len(index),
            num_decodes=decodes,
            query_start_loc=torch.from_numpy(starts.copy()).to(self.device),
            query_start_loc_host=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            seq_lens_bound=np.array(lengths, np.int32),
            block_table=torch.from_numpy(table).to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
            kv_index=torch.tensor(index, dtype=torch.int64, device=self.device),
        )
        return self.backends[group.kind].plan(batch, group)

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
            if group.kind == "cross":
                assert not padding_rows + padding_tokens, "steps of encoder-decoder models are not padded"
                sources = [row.request.source for row in rows]
                keys = [self.lengths[source] for source in sources]
                last = np.repeat(np.array(keys) - 1, counts).tolist()
                self.plans.append(self._planned(group, start, keys, [0] * len(last), last, sources, decodes))
                continue
            if group.kind == "encoder" and self._encodes:
                self.plans.append(None)
                continue
            table, slots = self._places(group, rows, padding_rows)
            if group.kind == "state":
                assert not padding_tokens, "tokens behind the rows of a step with states"
                starts = [row.request.computed for row in rows] + [0] * padding_rows
                self.plans.append(state_batch(starts, counts, table, group.tokens_per_block, self.device))
                continue
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
            self.plans.append(self.backends[group.kind].plan(batch, group))
        for row in rows:
            row.request.computed += row.length

    def release(self, request: Request) -> None:
        """Take its pages back, with what is in them: others get them as they are."""
        for free, pages in zip(self._free, request.pages, strict=False):
            free += pages
        request.pages = []
        request.computed = 0

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
    features = frozenset(model.attention_features)
    return tuple(
        AttentionNeed.of(form, size, dtype=dtype, kv_dtype=dtype, device=device, block_size=BLOCK, features=features)
        for form in forms(model)
    )


def forms(model: ModelDescription) -> list[KVSpec]:
    """The forms of the layers' caches and attention, in the order of their first layers."""
    return list(dict.fromkeys(msgspec.structs.replace(site, layer=None) for site in model.sites))


REFERENCE = ("torch", "torch_mla")
"""The reference drivers."""


def reference_cards(registry: Registry) -> dict[str, type[Card]]:
    """By kind of layer, the reference driver that serves it."""
    cards = [cast("type[AttentionCard]", registry.card(registry.find("attention", name))) for name in REFERENCE]
    return {kind: card for card in cards for kind in card.kinds}


def reference_attention(context: WorkerContext, registry: Registry) -> dict[str, Any]:
    """By kind of layer, the body of the reference driver that serves it."""
    bodies = {card: load_body(card)(context) for card in dict.fromkeys(reference_cards(registry).values())}
    return {kind: bodies[card] for kind, card in reference_cards(registry).items()}


def _group(index: int, form: KVSpec, sites: Sequence[KVSpec], need: AttentionNeed, itemsize: int) -> KVGroup:
    vectors = {"encoder": 0, "state": 0, "mla": 1}.get(form.kind, 2)
    elements = vectors * need.num_kv_heads * BLOCK * need.head_size
    return KVGroup(
        index=index,
        kind=form.kind,
        sites=tuple(i for i, site in enumerate(sites) if msgspec.structs.replace(site, layer=None) == form),
        num_kv_heads=need.num_kv_heads,
        head_size=need.head_size,
        sliding_window=form.sliding_window,
        tokens_per_block=BLOCK,
        layer_bytes=elements * itemsize,
        num_q_heads=need.num_q_heads,
        rope_size=form.rope_size,
    )
