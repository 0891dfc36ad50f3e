"""Attention: the groups of layers that it is planned for, and what a layer sees of it, a call with the step's tensors.

Cache and plan are the runner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from engine.interfaces.attention import AttentionBackend, AttentionLayer, AttentionNeed, LayerCache
from engine.interfaces.latent_attention import LatentAttentionBackend
from engine.types.errors import ContractError
from engine.types.kv import KVGroup, KVLayout
from engine.types.model import KVSpec

Backend = AttentionBackend | LatentAttentionBackend
"""A driver's body: the second of those that serve layers of kind "mla"."""


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
        layout: of the pool.
        sites: the specs whose places the layout's groups name.
        needs: of each group.
        backends: the body for each kind of layer.

    Attributes:
        layout, groups: the pool's form, and its groups.
        plans: of the step under way, one for each group. The runner sets its items; layers read them.
        pool: uint8 [num_pages, page_bytes]; None before it is bound.
    """

    def __init__(
        self,
        layout: KVLayout,
        sites: Sequence[KVSpec],
        needs: tuple[AttentionNeed, ...],
        backends: dict[str, Backend],
    ) -> None:
        self.layout = layout
        self.groups = layout.groups
        self._needs = needs
        self._backends = backends
        # Layers of kind "state" attend to nothing, and nothing computes "cross" yet.
        own = ((group, site) for group in layout.groups for site in group.sites if group.kind not in ("state", "cross"))
        self._of_layer = {sites[site].layer: (group, site) for group, site in own if not group.model}
        self._layers: list[tuple[int, LayerAttention | LatentLayerAttention]] = []
        self.plans: list[Any] = [None] * len(layout.groups)
        self.pool: torch.Tensor | None = None

    def __call__(
        self,
        layer: int,
        scale: float,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> LayerAttention:
        """The attention of the model's layer of this index. Raises ContractError for one of another stage."""
        group, site = self._site(layer)
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
        self._layers.append((site, made))
        return made

    def latent(self, layer: int, scale: float) -> LatentLayerAttention:
        """The attention of the model's layer of this index, which is of kind "mla". Raises as `__call__`."""
        group, site = self._site(layer)
        described = AttentionLayer(index=layer, group=group, need=self._needs[group.index], scale=scale)
        made = LatentLayerAttention(described, cast(LatentAttentionBackend, self.backend(group)), self.plans)
        self._layers.append((site, made))
        return made

    def _site(self, layer: int) -> tuple[KVGroup, int]:
        if (found := self._of_layer.get(layer)) is None:
            raise ContractError(
                f"build layer {layer} of the model",
                "this worker's stage does not have it",
                "let the model's author build its layers with engine.modeling.Stack, or leave "
                "--pipeline-parallel-size out",
                point="model",
            )
        return found

    def backend(self, group: KVGroup) -> Backend:
        """The body that serves a group."""
        return self._backends[group.kind]

    def bind(self, pool: torch.Tensor) -> None:
        """Give every layer its cache: its bytes of each page of its table. pool: uint8 [num_pages, page_bytes]."""
        self.pool = pool
        for site, made in self._layers:
            if isinstance(made, EncoderAttention):
                continue
            group, need = made.layer.group, made.layer.need
            start = group.offset + group.sites.index(site) * group.layer_bytes
            cache: Any = self.backend(group).cache(need, group, pool[:, start : start + group.layer_bytes])
            made.bind(cache)

    def can_capture_drafts(self) -> bool:
        """True where every group's steps of the same number of tokens in every row may be captured."""
        return all(self.backend(group).capture_level in ("uniform", "any") for group in self.groups)

    def can_capture_decodes(self) -> bool:
        """True where every group's steps of one token a row may be captured."""
        return all(self.backend(group).capture_level != "none" for group in self.groups)
