"""What bodies of models with routed experts have in common: the block with all of its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Linear
from engine_kit.model_config import integer
from engine_models.experts_card import ExpertsCard
from engine_moe.layers import Expert, ExpertRouter, RoutedExperts, StackedLinear, StackedTensor
from engine_moe.ops_moe.card import ClampedGLU


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
    stacked: type[StackedTensor] | None = None,
    expert_bias: bool = False,
    clamped: ClampedGLU | None = None,
) -> RoutedExperts:
    """A layer's feed-forward block.

    Args:
        config: filled.
        name: the checkpoint's, e.g. "model.layers.0.mlp".
        router, bias: see `ExpertRouter`, in the block.
        parts: the names of gate, up and down in an expert; of two the first has gate and up.
        shared: see `RoutedExperts`.
        stacked: how the checkpoint has each part of all experts in one tensor.
        expert_bias, clamped: see `Expert`.
    """
    size, count, inner = context.description.hidden_size, card.num_experts(config), integer(config, card.inner)
    chosen_by = None if bias is None else f"{name}.{bias}"
    chooser = ExpertRouter(context, size, count, card.form(config), f"{name}.{router}", chosen_by)
    linear = Linear if stacked is None else StackedLinear

    def expert(index: int) -> Expert:
        *first, last = (f"{name}.{part}" if stacked else f"{name}.experts.{index}.{part}" for part in parts)
        return Expert(context, size, inner, first, last, linear, expert_bias, clamped)

    experts = [expert(index) for index in range(count)]
    tensors = []
    if stacked is not None:
        firsts, lasts = [one.gate_up for one in experts], [one.down for one in experts]
        tensors = [
            stacked(cast("list[StackedLinear]", linears), f"{name}.{part}")
            for linears, part in ((firsts, parts[0]), (lasts, parts[-1]))
        ]
    return RoutedExperts(context, chooser, experts, shared, tensors)


def without_layers(
    weights: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], num_layers: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors without those of layers behind the last one, which predict further tokens."""
    more = max(integer(config, key, 0, low=0) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    behind = tuple(f"model.layers.{num_layers + index}." for index in range(more))
    return ((name, tensor) for name, tensor in weights if not name.startswith(behind))
