"""What bodies of models with routed experts have in common: the block with all of its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from engine.interfaces.experts import ExpertLayer
from engine.interfaces.model import ModelContext
from engine_kit.model_config import integer
from engine_kit.routing import ExpertAct, ExpertSpec
from engine_models.experts_card import ExpertsCard
from engine_moe.layers import ExpertRouter, RoutedExperts

SILU = ExpertAct()
"""What nearly all of them have."""


def routed_experts(
    context: ModelContext,
    card: type[ExpertsCard],
    config: Mapping[str, Any],
    name: str,
    *,
    router: str = "gate",
    bias: str | None = None,
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    stacked: str = "",
    expert_bias: bool = False,
    act: ExpertAct = SILU,
) -> RoutedExperts:
    """A layer's feed-forward block.

    Args:
        config: filled.
        name: the checkpoint's, e.g. "model.layers.0.mlp".
        router, bias: see `ExpertRouter`, in the block.
        parts: the names of gate, up and down in an expert; of two the first has gate and up.
        shared: see `RoutedExperts`.
        stacked, expert_bias, act: see `engine_kit.routing.ExpertSpec`.
    """
    size, count, inner = context.description.hidden_size, card.num_experts(config), integer(config, card.inner)
    chosen_by = None if bias is None else f"{name}.{bias}"
    chooser = ExpertRouter(context, size, count, card.form(config), f"{name}.{router}", chosen_by)
    *first, last = (f"{name}.{part}" if stacked else f"{name}.experts.{{}}.{part}" for part in parts)
    spec = ExpertSpec(count, size, inner, act, tuple(first), last, stacked, expert_bias)
    return RoutedExperts(context, chooser, expert_layer(context, spec), shared)


def expert_layer(context: ModelContext, spec: ExpertSpec) -> ExpertLayer:
    """What the point `experts` makes of it."""
    assert context.experts is not None, "the card names the operation `experts`"
    return context.experts.layer(context, spec)


def without_layers(
    weights: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], num_layers: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors without those of layers behind the last one, which predict further tokens."""
    more = max(integer(config, key, 0, low=0) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    behind = tuple(f"model.layers.{num_layers + index}." for index in range(more))
    return ((name, tensor) for name, tensor in weights if not name.startswith(behind))
