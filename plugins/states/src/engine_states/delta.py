"""Gated delta nets (Yang, Kautz, Hatamizadeh 2024), in the place that attention has in other models."""

from __future__ import annotations

from typing import Any

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Linear, Module, RMSNorm, RowParallelLinear
from engine.modeling.parallel import even
from engine_states.delta_form import DeltaForm
from engine_states.layers import Conv, Tensor, rates


class GatedDeltaNet(Module):
    """A mixer as Qwen3-Next has it (2025): x [T, hidden_size] -> the same. Each rank holds some of the key heads, and
    the value heads that belong to them.

    Args:
        index: of the layer.
        name: the checkpoint's, e.g. "model.layers.0.linear_attn".
    """

    def __init__(self, context: ModelContext, index: int, form: DeltaForm, name: str) -> None:
        assert context.state is not None
        self._ops: Any = context.ops
        self.form = form
        self.site = context.state(index)
        size, self._each = form.hidden_size, form.value_heads // form.key_heads
        keys, values = (even(n, context, f"the heads of {name}") for n in (form.key_heads, form.value_heads))
        mixed = (keys.of_units(form.key_size), keys.of_units(form.key_size), values.of_units(form.value_size))
        self._mixed = [shard.length for shard in mixed]
        # Each key head's query, key, values and gates stand together, and so do its value heads' two numbers.
        self._parts = [form.key_size] * 2 + [self._each * form.value_size] * 2
        self.in_proj = Linear(
            context, size, [keys.of_units(sum(self._parts))], [f"{name}.in_proj_qkvz"], bias=False, kind="linear"
        )
        self.numbers = Linear(
            context, size, [keys.of_units(2 * self._each)], [f"{name}.in_proj_ba"], bias=False, kind="linear"
        )
        self.conv = Conv(context, sum(form.channels), form.kernel, mixed, False, f"{name}.conv1d")
        self.dt_bias = Tensor(context, f"{name}.dt_bias", (form.value_heads,), (values,))
        self.a = Tensor(context, f"{name}.A_log", (form.value_heads,), (values,), make=rates)
        self.norm = RMSNorm(context, form.value_size, form.eps, f"{name}.norm")
        self.out_proj = RowParallelLinear(context, form.value_heads * form.value_size, size, f"{name}.out_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        form, site, ops = self.form, self.site, self._ops
        parts = self.in_proj(x).unflatten(-1, (-1, sum(self._parts))).split(self._parts, dim=-1)
        *mixed, gate = parts
        beta, dt = self.numbers(x).unflatten(-1, (-1, 2 * self._each)).chunk(2, dim=-1)
        (mixture,) = self.conv((ops.join(mixed),), site, "conv")
        q, k, v = mixture.split(self._mixed, dim=-1)
        y = ops.gated_delta(
            q.unflatten(-1, (-1, form.key_size)),
            k.unflatten(-1, (-1, form.key_size)),
            v.unflatten(-1, (-1, form.value_size)),
            ops.join((dt,)),
            self.a.tensor,
            self.dt_bias.tensor,
            ops.join((beta,)),
            site,
            "delta",
        )
        return self.out_proj(ops.gate_by(self.norm(y).flatten(1), ops.join((gate,)), silu=True))
