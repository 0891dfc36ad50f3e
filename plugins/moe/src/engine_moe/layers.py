"""Layers of routed experts (Shazeer et al. 2017; Switch, Fedus et al. 2021; Mixtral, 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.interfaces.experts import ExpertLayer
from engine.interfaces.model import ModelContext
from engine.modeling import Linear, Module, Param
from engine_kit.routing import RouteForm


class WideTensor(Module):
    """One of the checkpoint's tensors, kept whole in float32 at least.

    Args:
        name: the checkpoint's.
    """

    def __init__(self, context: ModelContext, shape: tuple[int, ...], name: str) -> None:
        self._dtype = torch.promote_types(context.dtype, torch.float32)
        self._device = context.device
        self._param = Param(name, shape, self)
        self.tensor = torch.empty(0)

    def params(self) -> list[Param]:
        """The tensor."""
        return [self._param]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy it."""
        self.tensor = tensor.to(self._device, self._dtype, copy=True)

    def own_bytes(self, itemsize: int) -> int:
        """In its own dtype."""
        return self.num_elements() * self._dtype.itemsize


class ExpertRouter(Module):
    """Chooses experts for each token, in float32 at least: of near experts the wrong one would be another model.

    Args:
        name: the checkpoint's, without ".weight".
        bias: the checkpoint's name of what is added where experts are chosen, or to logits (`RouteForm`); None where
            there is none.
    """

    def __init__(
        self,
        context: ModelContext,
        hidden_size: int,
        num_experts: int,
        form: RouteForm,
        name: str,
        bias: str | None = None,
    ) -> None:
        self._ops: Any = context.ops
        self._matrix = WideTensor(context, (num_experts, hidden_size), f"{name}.weight")
        self._bias = None if bias is None else WideTensor(context, (num_experts,), bias)
        self.form = form

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] -> ids int32 [T, k], weights [T, k] in float32 at least."""
        logits = self._ops.router_logits(x, self._matrix.tensor)
        return self._ops.route(logits, None if self._bias is None else self._bias.tensor, self.form)


class GatedBlock(Module):
    """sigmoid(gate(x)) * block(x), with one gate for each token (Qwen2-MoE, 2024).

    Args:
        block: [T, hidden_size] -> the same.
        name: of the gate in the checkpoint, without ".weight".
    """

    def __init__(
        self, context: ModelContext, hidden_size: int, block: Callable[[torch.Tensor], torch.Tensor], name: str
    ) -> None:
        self._ops: Any = context.ops
        self.gate = Linear(context, hidden_size, [1], [name], bias=False)
        self.block = block

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self._ops.moe_gate(self.block(x), self.gate(x))


class RoutedExperts(Module):
    """A feed-forward block of which each token uses some experts, and what all tokens use beside them.

    Args:
        router: chooses.
        experts: all of them, in the router's order, however they are divided over ranks.
        shared: added for every token; None where there is nothing.
    """

    def __init__(
        self,
        context: ModelContext,
        router: ExpertRouter,
        experts: ExpertLayer,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._ops: Any = context.ops
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        routed = self.experts(x, *self.router(x))
        return routed if self.shared is None else self._ops.add(routed, self.shared(x))
