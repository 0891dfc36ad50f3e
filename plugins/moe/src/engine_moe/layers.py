"""Layers of routed experts (Shazeer et al. 2017; Switch, Fedus et al. 2021; Mixtral, 2024).

Over several ranks each holds a part of every expert, as of a dense block, and one sum over ranks follows the sum over
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Linear, Module, Param
from engine.modeling.parallel import even, group_of
from engine_moe.ops_moe.card import ClampedGLU, RouteForm


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
        """x [T, hidden_size] -> ids int64 [T, k], weights [T, k]."""
        bias = None if self._bias is None else self._bias.tensor
        return self._ops.moe_route(x, self._matrix.tensor, bias, self.form)


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


class StackedLinear(Linear):
    """A linear layer whose tensor is a part of one that it shares with others, see `StackedTensor`."""

    def params(self) -> list[Param]:
        """None of its own."""
        return []

    def take(self, key: str, tensor: torch.Tensor) -> None:
        """Its part of the checkpoint's tensor, all ranks': "weight" [out, in] or "bias" [out], which another rank may
        add."""
        for param in super().params():
            if param.key[0].key == key:
                self.load(param, param.cut(tensor))

    def pack(self) -> None:
        """All is taken."""
        super().finish()

    def finish(self) -> None:
        """Who has its tensors packs it."""


class StackedTensor(Module):
    """The checkpoint's one tensor of a projection of all experts, `<name>.weight` [E, out, in]."""

    def __init__(self, linears: Sequence[StackedLinear], name: str) -> None:
        self.linears = list(linears)
        self._name = name

    def params(self) -> list[Param]:
        """The tensor, whole on every rank: each expert cuts its own part."""
        shape = self.linears[0].shape
        outputs = sum(part.total for part in shape.outputs)
        return [Param(f"{self._name}.weight", (len(self.linears), outputs, shape.inputs.total), self)]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Give each its part."""
        for linear, part in zip(self.linears, tensor, strict=True):
            linear.take("weight", part)
            linear.pack()

    def num_elements(self) -> int:
        """None beside the layers'."""
        return 0


class TurnedTensor(StackedTensor):
    """The same stored turned and with biases, `<name>` [E, in, out] and `<name>_bias` [E, out]; where there are two
    parts, such as gate and up, their outputs take turns (gpt-oss)."""

    def params(self) -> list[Param]:
        """Both, whole on every rank."""
        (whole,) = super().params()
        experts, outputs, inputs = whole.shape
        return [
            Param(self._name, (experts, inputs, outputs), self, "weight"),
            Param(f"{self._name}_bias", (experts, outputs), self, "bias"),
        ]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Give each its part, with all outputs of one part before those of the next."""
        for linear, part in zip(self.linears, tensor, strict=True):
            rows = part.T if param.key == "weight" else part
            turns = rows.unflatten(0, (-1, len(linear.shape.outputs)))
            linear.take(param.key, turns.transpose(0, 1).flatten(0, 1))

    def finish(self) -> None:
        """Pack them."""
        for linear in self.linears:
            linear.pack()


class Expert(Module):
    """down(silu(gate(x)) * up(x)), of this rank's part of the inner size: to be summed over ranks.

    Args:
        first: the checkpoint's names of gate and up, e.g. "model.layers.0.mlp.experts.3.gate_proj"; one name where it
            has them in one tensor, one after the other.
        last: of down.
        linear: `StackedLinear` where the checkpoint has all experts in one tensor.
        bias: whether both projections have one.
        clamped: what stands for silu(gate) * up.
    """

    def __init__(
        self,
        context: ModelContext,
        hidden_size: int,
        inner_size: int,
        first: Sequence[str],
        last: str,
        linear: type[Linear] = Linear,
        bias: bool = False,
        clamped: ClampedGLU | None = None,
    ) -> None:
        self._ops: Any = context.ops
        self._clamped = clamped
        inner = even(inner_size, context, last)
        self.gate_up = linear(context, hidden_size, [inner, inner], first, bias, kind="linear")
        adds_bias = context.tp_rank == 0
        self.down = linear(context, inner, [hidden_size], [last], bias, adds_bias=adds_bias, kind="linear")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden_size] -> [n, hidden_size]."""
        inner = self.gate_up(x)
        if self._clamped is None:
            return self.down(self._ops.silu_mul(inner))
        return self.down(self._ops.moe_clamped_glu(inner, self._clamped))


class RoutedExperts(Module):
    """A feed-forward block of which each token uses some experts, and what all tokens use beside them.

    Args:
        router: chooses.
        experts: all of them, in the router's order.
        shared: added for every token; None where there is nothing.
        tensors: those of the checkpoint that the experts share.
    """

    def __init__(
        self,
        context: ModelContext,
        router: ExpertRouter,
        experts: Sequence[Expert],
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        tensors: Sequence[StackedTensor] = (),
    ) -> None:
        self._ops: Any = context.ops
        self._group = group_of(context)
        self.router = router
        self.experts = list(experts)
        self.shared = shared
        self.tensors = list(tensors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        ids, weights = self.router(x)
        routed = self._ops.moe_apply(x, ids, weights, self.experts)
        if self._group is not None:
            routed = self._group.all_reduce(routed)
        return routed if self.shared is None else self._ops.add(routed, self.shared(x))
