"""Mamba's mixers, in the place that attention has in other models.

Over several ranks each holds some channels, in Mamba-2 whole heads and their groups; a single group is on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.interfaces.model import ModelContext, StateSite
from engine.modeling import ColumnParallelLinear, Linear, MergedColumnLinear, Module, Param, RMSNorm, RowParallelLinear
from engine.modeling.parallel import even, group_of
from engine.types.parallel import Shard
from engine_states.forms import Mamba1Form, Mamba2Form


class Tensor(Module):
    """One of the checkpoint's tensors.

    Args:
        name: the checkpoint's. shape: there.
        shards: what this rank keeps along its first dimension, one after the other.
        wide: kept in float32 at least; else in the model's dtype.
        make: what is made of it, while it is loaded.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: tuple[int, ...],
        shards: tuple[Shard, ...],
        wide: bool = True,
        make: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._make = make
        self._dtype = torch.promote_types(context.dtype, torch.float32) if wide else context.dtype
        self._device = context.device
        starts = [sum(shard.total for shard in shards[:i]) for i in range(len(shards))]
        pieces = tuple(
            (slice(start + shard.start, start + shard.start + shard.length),)
            for start, shard in zip(starts, shards, strict=True)
        )
        self._param = Param(name, shape, self, pieces=pieces)
        self.tensor = torch.empty(0)

    def params(self) -> list[Param]:
        """The tensor."""
        return [self._param]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy it, and make of it what it is to be."""
        copied = tensor.to(self._device, self._dtype, copy=True)
        self.tensor = copied if self._make is None else self._make(copied).contiguous()

    def own_bytes(self, itemsize: int) -> int:
        """In its own dtype."""
        return self.num_elements() * self._dtype.itemsize


def rates(log: torch.Tensor) -> torch.Tensor:
    """Rates of decay, [.., C] in the order of states, of their negated logarithms as checkpoints have them, [C, ..]."""
    return -log.exp().T if log.dim() > 1 else -log.exp()


class Conv(Module):
    """A convolution over the last tokens of each channel, with silu behind. shards: the channels of this rank."""

    def __init__(
        self, context: ModelContext, channels: int, kernel: int, shards: tuple[Shard, ...], bias: bool, name: str
    ) -> None:
        self._ops: Any = context.ops
        shape = (channels, 1, kernel)
        self.weight = Tensor(
            context, f"{name}.weight", shape, shards, wide=False, make=lambda weight: weight.squeeze(1).T
        )
        self.bias = Tensor(context, f"{name}.bias", (channels,), shards, wide=False) if bias else None

    def __call__(self, parts: Sequence[torch.Tensor], site: StateSite, *names: str) -> list[torch.Tensor]:
        """Parts [T, C] of the channels, each with its state's name -> the same."""
        found, end = [], 0
        for part, name in zip(parts, names, strict=True):
            start, end = end, end + part.shape[-1]
            bias = None if self.bias is None else self.bias.tensor[start:end]
            found.append(self._ops.causal_conv(part, self.weight.tensor[:, start:end], bias, site, name))
        return found


class Mamba1Mixer(Module):
    """Mamba (Gu, Dao 2023), and Jamba's (Lieber et al. 2024): x [T, hidden_size] -> the same.

    Args:
        index: of the layer.
        name: the checkpoint's, e.g. "backbone.layers.0.mixer".
    """

    def __init__(self, context: ModelContext, index: int, form: Mamba1Form, name: str) -> None:
        assert context.state is not None
        self._ops: Any = context.ops
        self.form = form
        self.site = context.state(index)
        size, inner, bias = form.hidden_size, form.inner, form.bias
        rows = even(inner, context, f"the channels of {name}")
        self.inner = rows.length
        self.in_proj = MergedColumnLinear(context, size, [inner, inner], [f"{name}.in_proj"], bias)
        self.conv = Conv(context, inner, form.kernel, (rows,), form.conv_bias, f"{name}.conv1d")
        self.x_proj = RowParallelLinear(context, inner, form.dt_rank + 2 * form.state, f"{name}.x_proj")
        parts = {"dt": form.dt_rank, "b": form.state, "c": form.state}
        self.norms: list[RMSNorm] = []
        if form.norm_eps is not None:
            self.norms = [RMSNorm(context, n, form.norm_eps, f"{name}.{one}_layernorm") for one, n in parts.items()]
        self.dt_proj = ColumnParallelLinear(context, form.dt_rank, inner, f"{name}.dt_proj", bias=True)
        self.a = Tensor(context, f"{name}.A_log", (inner, form.state), (rows,), make=rates)
        self.d = Tensor(context, f"{name}.D", (inner,), (rows,))
        self.out_proj = RowParallelLinear(context, inner, size, f"{name}.out_proj", bias)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]. positions: what attention reads, and nothing here."""
        del positions
        form, site, ops = self.form, self.site, self._ops
        x, gate = self.in_proj(x).split(self.inner, dim=-1)
        (x,) = self.conv((x,), site, "conv")
        dt, b, c = self.x_proj(x).split([form.dt_rank, form.state, form.state], dim=-1)
        if self.norms:
            dt, b, c = (norm(part) for norm, part in zip(self.norms, (dt, b, c), strict=True))
        dt = self.dt_proj(dt)
        return self.out_proj(ops.selective_scan(x, dt, self.a.tensor, b, c, self.d.tensor, gate, site, "ssm"))


class Mamba2Mixer(Module):
    """Mamba-2 (Dao, Gu 2024): x [T, hidden_size] -> the same. Args as `Mamba1Mixer`."""

    def __init__(self, context: ModelContext, index: int, form: Mamba2Form, name: str) -> None:
        assert context.state is not None
        self._ops: Any = context.ops
        self.form = form
        self.site = context.state(index)
        heads = even(form.heads, context, f"the heads of {name}")
        channels, shared = heads.of_units(form.head_size), form.groups * form.state
        of_group = Shard.of(shared) if form.groups == 1 else even(shared, context, f"the groups of {name}")
        mixed = (channels, of_group, of_group)
        self._mixed = [shard.length for shard in mixed]
        self._heads = heads.length
        self.in_proj = Linear(
            context, form.hidden_size, [channels, *mixed, heads], [f"{name}.in_proj"], form.bias, kind="linear"
        )
        self.conv = Conv(context, form.inner + 2 * shared, form.kernel, mixed, form.conv_bias, f"{name}.conv1d")
        self.dt_bias = Tensor(context, f"{name}.dt_bias", (form.heads,), (heads,))
        self.a = Tensor(context, f"{name}.A_log", (form.heads,), (heads,), make=rates)
        self.d = Tensor(context, f"{name}.D", (form.heads,), (heads,))
        self.norm: Tensor | None = None
        if form.norm != "none":
            self.norm = Tensor(context, f"{name}.norm.weight", (form.inner,), (channels,), wide=False)
        self._ranks = group_of(context) if form.groups == 1 else None
        bias = form.bias if form.out_bias is None else form.out_bias
        self.out_proj = RowParallelLinear(context, form.inner, form.hidden_size, f"{name}.out_proj", bias)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]. positions: what attention reads, and nothing here."""
        del positions
        form, site, ops = self.form, self.site, self._ops
        gate, *mixed, dt = self._projected(x)
        x, b, c = self.conv(mixed, site, "conv_x", "conv_b", "conv_c")
        y = ops.ssd(
            x.unflatten(-1, (self._heads, form.head_size)),
            dt,
            self.a.tensor,
            b.unflatten(-1, (-1, form.state)),
            c.unflatten(-1, (-1, form.state)),
            self.d.tensor,
            self.dt_bias.tensor,
            form.dt_limit,
            site,
            "ssm",
        )
        return self.out_proj(self._gated(y.flatten(1), gate))

    def _projected(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x [T, hidden_size] -> the gate, the three that the convolution reads, and the steps."""
        parts = self.in_proj(x).split([self._mixed[0], *self._mixed, self._heads], dim=-1)
        if not self.form.factors:
            return parts
        return [self._ops.scale(part, by) for part, by in zip(parts, self.form.factors, strict=True)]

    def _gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y and gate [T, channels] -> the same."""
        form, ops = self.form, self._ops
        if self.norm is None:
            return ops.gate_by(y, gate, silu=True)
        size, last = form.inner // form.groups, form.norm == "before_gate"
        return ops.gated_norm(y, gate, self.norm.tensor, form.eps, size, self._ranks, gate_last=last)
