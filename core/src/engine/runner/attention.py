"""Attention: the groups of layers that it is planned for, and what a layer sees of it, a call with the step's tensors.

Cache and plan are the runner's.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from engine.interfaces.attention import AttentionBackend, AttentionLayer, AttentionNeed, LayerCache
from engine.interfaces.latent_attention import LatentAttentionBackend
from engine.types.errors import ContractError
from engine.types.kv import KVGroup, KVLayout, kv_heads_on_rank
from engine.types.model import ModelDescription

Backend = AttentionBackend | LatentAttentionBackend
"""A driver's body: the second of those that serve layers of kind "mla"."""


def attention_groups(layout: KVLayout, model: ModelDescription, size: int = 1) -> tuple[KVGroup, ...]:
    """The layout's groups, then one for each form of layer that keeps nothing: its pages hold no byte.

    size: ranks over which heads are divided.
    """
    uncached: dict[tuple[int, int], list[int]] = {}
    for layer, spec in enumerate(model.kv_specs):
        if spec.kind == "encoder":
            uncached.setdefault((spec.num_kv_heads, spec.head_size), []).append(layer)
    return layout.groups + tuple(
        KVGroup(
            index=len(layout.groups) + index,
            kind="encoder",
            layers=tuple(layers),
            num_kv_heads=kv_heads_on_rank(num_kv_heads, size),
            head_size=head_size,
            sliding_window=None,
            tokens_per_block=layout.block_size,
            layer_bytes=0,
        )
        for index, ((num_kv_heads, head_size), layers) in enumerate(uncached.items())
    )


class LayerAttention:
    """One layer's attention. Implements `engine.interfaces.model.PagedAttention`."""

    __slots__ = ("_backend", "_cache", "_layer", "_plans")

    def __init__(self, layer: AttentionLayer, backend: AttentionBackend, plans: list[Any]) -> None:
        self._layer = layer
        self._backend = backend
        self._plans = plans
        self._cache: LayerCache | None = None

    @property
    def layer(self) -> AttentionLayer:
        """Which layer it is."""
        return self._layer

    def bind(self, cache: LayerCache) -> None:
        """Give it its views of the pool, which is allocated after the weights are loaded."""
        self._cache = cache

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]."""
        cache, plan = self._cache, self._plans[self._layer.group.index]
        assert cache is not None
        self._backend.write(self._layer, k, v, cache, plan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._backend.forward(self._layer, q, k, v, cache, plan, out)
        return out.view(len(q), -1)


class EncoderAttention(LayerAttention):
    """The attention of a layer that keeps nothing."""

    __slots__ = ()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        nothing = LayerCache(k[:0], v[:0])
        self._backend.forward(self._layer, q, k, v, nothing, self._plans[self._layer.group.index], out)
        return out.view(len(q), -1)


class LatentLayerAttention:
    """The attention of one layer of kind "mla". Implements `engine.interfaces.model.PagedLatentAttention`."""

    __slots__ = ("_backend", "_cache", "_layer", "_plans")

    def __init__(self, layer: AttentionLayer, backend: LatentAttentionBackend, plans: list[Any]) -> None:
        self._layer = layer
        self._backend = backend
        self._plans = plans
        self._cache: torch.Tensor | None = None

    @property
    def layer(self) -> AttentionLayer:
        """Which layer it is."""
        return self._layer

    def bind(self, cache: torch.Tensor) -> None:
        """Give it its view of the pool, which is allocated after the weights are loaded."""
        self._cache = cache

    def __call__(
        self, q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor
    ) -> torch.Tensor:
        """q_latent [T, Hq, C], q_rope [T, Hq, P], latent [T, C], rope_key [T, P] -> [T, Hq, C]."""
        cache, plan = self._cache, self._plans[self._layer.group.index]
        assert cache is not None
        self._backend.write(self._layer, latent, rope_key, cache, plan)
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        self._backend.forward(self._layer, q_latent, q_rope, cache, plan, out)
        return out


class AttentionLayers:
    """All attention of a worker: makes the layers', and holds the step's plans.

    Implements `engine.interfaces.model.AttentionFactory`; `latent` is a
    `engine.interfaces.model.LatentAttentionFactory`.

    Args:
        groups: all of them, see `attention_groups`.
        needs: of each group.
        backends: the body for each kind of layer.

    Attributes:
        plans: of the step under way, one for each group. The runner sets its items; layers read them.
        pool: uint8 [num_pages, page_bytes]; None before it is bound.
    """

    def __init__(
        self, groups: tuple[KVGroup, ...], needs: tuple[AttentionNeed, ...], backends: dict[str, Backend]
    ) -> None:
        self.groups = groups
        self._needs = needs
        self._backends = backends
        self._group_of = {layer: group for group in groups for layer in group.layers}
        self._layers: list[LayerAttention | LatentLayerAttention] = []
        self.plans: list[Any] = [None] * len(groups)
        self.pool: torch.Tensor | None = None

    def __call__(
        self,
        layer: int,
        scale: float,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> LayerAttention:
        """The attention of the model's layer of this index. Raises ContractError for one of another stage."""
        group = self._group(layer)
        kind = EncoderAttention if group.kind == "encoder" else LayerAttention
        made = kind(
            AttentionLayer(
                index=layer,
                group=group,
                need=self._needs[group.index],
                scale=scale,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
            ),
            cast(AttentionBackend, self.backend(group)),
            self.plans,
        )
        self._layers.append(made)
        return made

    def latent(self, layer: int, scale: float) -> LatentLayerAttention:
        """The attention of the model's layer of this index, which is of kind "mla". Raises as `__call__`."""
        group = self._group(layer)
        described = AttentionLayer(index=layer, group=group, need=self._needs[group.index], scale=scale)
        made = LatentLayerAttention(described, cast(LatentAttentionBackend, self.backend(group)), self.plans)
        self._layers.append(made)
        return made

    def _group(self, layer: int) -> KVGroup:
        if (group := self._group_of.get(layer)) is None:
            raise ContractError(
                f"build layer {layer} of the model",
                "this worker's stage does not have it",
                "let the model's author build its layers with engine.modeling.Stack, or leave "
                "--pipeline-parallel-size out",
                point="model",
            )
        return group

    def backend(self, group: KVGroup) -> Backend:
        """The body that serves a group."""
        return self._backends[group.kind]

    def bind(self, pool: torch.Tensor) -> None:
        """Give every layer its cache: its bytes of each page of its group. pool: uint8 [num_pages, page_bytes]."""
        self.pool = pool
        for made in self._layers:
            if isinstance(made, EncoderAttention):
                continue
            group, need = made.layer.group, made.layer.need
            start = group.layers.index(made.layer.index) * group.layer_bytes
            cache: Any = self.backend(group).cache(need, group, pool[:, start : start + group.layer_bytes])
            made.bind(cache)

    def can_capture_drafts(self) -> bool:
        """True where every group's steps of the same number of tokens in every row may be captured."""
        return all(self.backend(group).capture_level in ("uniform", "any") for group in self.groups)

    def can_capture_decodes(self) -> bool:
        """True where every group's steps of one token a row may be captured."""
        return all(self.backend(group).capture_level != "none" for group in self.groups)
