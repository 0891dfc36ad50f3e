"""Attention: the groups of layers that it is planned for, and what a layer sees of it, a call with the step's tensors.

Cache and plan are the runner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.distributed.group import ProcessGroup
from engine.interfaces.attention import (
    AttentionBatch,
    AttentionLayer,
    AttentionNeed,
    CaptureLevel,
    LayerCache,
    Rotation,
)
from engine.types.errors import ContractError
from engine.types.kv import KVGroup, KVLayout
from engine.types.model import KVSpec
from engine.types.plan import StepPlan

Backend = Any
"""A driver's body: an `AttentionBackend`; for layers of kind "mla" a `LatentAttentionBackend`; for those of kind
"state" an `engine.runner.states.StateBackend`."""


class LayerAttention:
    """One layer's attention. Implements `engine.interfaces.model.PagedAttention`.

    Attributes:
        layer: which it is.
        rotates: its driver rotates queries and keys where it writes.
    """

    __slots__ = ("_backend", "_cache", "_plans", "_shares", "layer", "rotates")

    def __init__(
        self, layer: AttentionLayer, backend: Any, plans: list[Any], shares: ProcessGroup | None = None
    ) -> None:
        self.layer = layer
        self._shares = shares
        self.rotates = layer.group.kind != "encoder" and hasattr(backend, "write_rotated")
        self._backend = backend
        self._plans = plans
        self._cache: Any = None

    def bind(self, cache: Any) -> None:
        """Give it its views of the pool, which is allocated after the weights are loaded."""
        self._cache = cache

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was stored at slots: see `engine.interfaces.attention.AttentionBackend.read`."""
        found: tuple[torch.Tensor, torch.Tensor] = self._backend.read(self.layer.group, self._cache, slots)
        return found

    def write(self, kept: Sequence[torch.Tensor], plan: Any) -> None:
        """Store what `read` gives where a plan says."""
        self._backend.write(self.layer, *kept, self._cache, plan)

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """What was stored at slots goes to others: see `engine.interfaces.attention.AttentionBackend.move`."""
        self._backend.move(self.layer.group, self._cache, source, destination)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]."""
        cache, plan = self._cache, self._plans[self.layer.group.index]
        if rotation is None:
            self._backend.write(self.layer, k, v, cache, plan)
        else:
            q, k = self._backend.write_rotated(self.layer, q, k, v, rotation, cache, plan)
        return self._attend(q, q, k, v, cache, plan).view(len(q), -1)

    def _attend(self, q: torch.Tensor, *inputs: Any) -> torch.Tensor:
        """What the backend makes of queries like q [T, Hq, D]: with those of the ranks that share sequences, each of
        which has some of the keys."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._shares is None:
            self._backend.forward(self.layer, *inputs, out)
            return out
        precise = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty(q.shape[:2], dtype=precise, device=q.device)
        self._backend.forward(self.layer, *inputs, out, lse)
        total = self._shares.all_gather(lse.unsqueeze(0)).logsumexp(0)
        weight = (lse - total).exp_().nan_to_num_()  # padding sees no key on any rank
        return self._shares.all_reduce(out * weight.unsqueeze(-1)).to(q.dtype)


class EncoderAttention(LayerAttention):
    """The attention of a layer that keeps nothing."""

    __slots__ = ()

    def __call__(  # type: ignore[override]
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        nothing = LayerCache(k[:0], v[:0])
        self._backend.forward(self.layer, q, k, v, nothing, self._plans[self.layer.group.index], out)
        return out.view(len(q), -1)


class CrossAttention(LayerAttention):
    """A decoder layer's view of what the encoder has left. Implements `engine.interfaces.model.PagedCrossAttention`."""

    __slots__ = ()

    def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [n, Hkv, D], of the input that is being encoded."""
        self.write((k, v), self._plans[self.layer.group.index])

    def __call__(self, q: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """q [T, Hq, D] -> [T, Hq * D]."""
        out, none = torch.empty(q.shape, dtype=q.dtype, device=q.device), q[:0, : self.layer.need.num_kv_heads]
        plan = self._plans[self.layer.group.index]
        self._backend.forward(self.layer, q, none, none, self._cache, plan, out)
        return out.view(len(q), -1)


class LatentLayerAttention(LayerAttention):
    """The attention of one layer of kind "mla". Implements `engine.interfaces.model.PagedLatentAttention`."""

    __slots__ = ()

    def __call__(  # type: ignore[override]
        self, q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor
    ) -> torch.Tensor:
        """q_latent [T, Hq, C], q_rope [T, Hq, P], latent [T, C], rope_key [T, P] -> [T, Hq, C]."""
        cache, plan = self._cache, self._plans[self.layer.group.index]
        self._backend.write(self.layer, latent, rope_key, cache, plan)
        return self._attend(q_latent, q_latent, q_rope, cache, plan)


class AttentionLayers:
    """All attention of a worker: makes the layers', and holds the step's plans.

    Implements `engine.interfaces.model.AttentionFactory`; `latent` is a
    `engine.interfaces.model.LatentAttentionFactory`.

    Args:
        layout: of the pool.
        sites: the specs whose places the layout's groups name.
        needs: of each group.
        backends: the body for each kind of layer.
        shares: the ranks that share sequences; None where this one has them whole.

    Attributes:
        layout, groups: the pool's form, and its groups.
        stepped: those for which the runner plans each step: not what an encoder-decoder model has beside the pool.
        plans: of the step under way, one for each group. The runner sets its items; layers read them.
        pool: uint8 [num_pages, page_bytes]; None before it is bound.
        sites: the layers' attention, by site.
        states: an `engine.runner.states.StateBackend`; None where no layer has any.
    """

    def __init__(
        self,
        layout: KVLayout,
        sites: Sequence[KVSpec],
        needs: tuple[AttentionNeed, ...],
        backends: dict[str, Backend],
        shares: ProcessGroup | None = None,
    ) -> None:
        self._shares = shares
        self.layout = layout
        self.groups = layout.groups
        beside = any(group.kind == "cross" for group in layout.groups)
        self.stepped = tuple(group for group in layout.groups if group.table is not None or not beside)
        self._needs = needs
        self._backends = backends
        own = ((group, site) for group in layout.groups for site in group.sites)
        # A layer may have states, or a view of the encoder, beside its attention.
        self._of_layer = {(group.model, sites[site].layer, _form(group.kind)): (group, site) for group, site in own}
        self.sites: dict[int, LayerAttention] = {}
        self.plans: list[Any] = [None] * len(layout.groups)
        self.states = backends.get("state")
        self.pool: torch.Tensor | None = None

    def __call__(
        self,
        layer: int,
        scale: float,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        relative_bias: torch.Tensor | None = None,
        model: int = 0,
    ) -> LayerAttention:
        """The attention of a model's layer of this index. Raises ContractError for one of another stage."""
        given, site = self.given(
            layer, scale, model, sinks=sinks, alibi_slopes=alibi_slopes, relative_bias=relative_bias
        )
        kind = EncoderAttention if given.group.kind == "encoder" else LayerAttention
        self.sites[site] = made = kind(given, self.backend(given.group), self.plans, self._shares)
        return made

    def latent(self, layer: int, scale: float, model: int = 0) -> LatentLayerAttention:
        """The attention of a model's layer of this index, which is of kind "mla". Raises as `__call__`."""
        given, site = self.given(layer, scale, model)
        self.sites[site] = made = LatentLayerAttention(given, self.backend(given.group), self.plans, self._shares)
        return made

    def cross(self, layer: int, scale: float, model: int = 0) -> CrossAttention:
        """The view that a decoder's layer of this index has of the encoder. Raises as `__call__`."""
        given, site = self.given(layer, scale, model, kind="cross")
        self.sites[site] = made = CrossAttention(given, self.backend(given.group), self.plans)
        return made

    def given(
        self, layer: int, scale: float, model: int = 0, kind: str = "", **more: Any
    ) -> tuple[AttentionLayer, int]:
        """What the backend is told of a layer, and the layer's site; kind: "state" or "cross" for one beside its own
        attention."""
        if (found := self._of_layer.get((model, layer, _form(kind)))) is None:
            raise ContractError(
                f"build layer {layer} of the model",
                "this worker's stage does not have it",
                "let the model's author build its layers with engine.modeling.Stack, or leave "
                "--pipeline-parallel-size out",
                point="model",
            )
        group, site = found
        return AttentionLayer(index=layer, group=group, need=self.need(group), scale=scale, **more), site

    def need(self, group: KVGroup) -> AttentionNeed:
        """What was asked of attention for a group."""
        return self._needs[group.index]

    def backend(self, group: KVGroup) -> Backend:
        """The body that serves a group."""
        return self._backends[group.kind]

    def bind(self, pool: torch.Tensor, cross: bool = False) -> None:
        """Give every layer its cache: its bytes of each page of its table. pool: uint8 [num_pages, page_bytes];
        `cross`: it is of what encoders leave, and for its layers alone."""
        self.pool = self.pool if cross else pool
        for site, made in self.sites.items():
            if isinstance(made, EncoderAttention) or isinstance(made, CrossAttention) != cross:
                continue
            group, need = made.layer.group, made.layer.need
            start = group.offset + group.sites.index(site) * group.layer_bytes
            cache: Any = self.backend(group).cache(need, group, pool[:, start : start + group.layer_bytes])
            made.bind(cache)

    def move(self, batches: Sequence[AttentionBatch], source: torch.Tensor, destination: torch.Tensor) -> None:
        """What is kept of tokens `source` of a step goes to the places of tokens `destination`: int64 [n]."""
        for group, batch in zip(self.stepped, batches, strict=True):
            slots = batch.slot_mapping[source], batch.slot_mapping[destination]
            for site in group.sites:
                self.sites[site].move(*slots)

    def begin(self, plan: StepPlan) -> None:
        """Attention is going to be planned for this step."""
        if self.states is not None:
            self.states.step = plan

    def restore(self, counts: torch.Tensor) -> None:
        """Put back the states after the last draws that count. counts: int32 [m], of each row that draws."""
        if self.states is not None:
            self.states.restore(counts)

    def captures(self, *levels: CaptureLevel) -> bool:
        """Whether every group's `capture_level` is among these."""
        return all(self.backend(group).capture_level in levels for group in self.groups)


def _form(kind: str) -> str:
    return kind if kind in ("state", "cross") else ""
