"""Linear layers. Their tensors are packed after loading, and then freed: by the ops driver, or by the quantization
driver of the layer's kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from engine.interfaces.model import ModelContext
from engine.interfaces.ops import Ops
from engine.interfaces.quantization import EMBEDDING, LayerShape, Quantization, StoredTensor, plain_tensors
from engine.modeling.loading import staging
from engine.modeling.module import Module, Param
from engine.modeling.parallel import even, group_of, kv_heads
from engine.types.errors import UnsupportedModelError
from engine.types.parallel import Shard


class Linear(Module):
    """x [T, in_size] -> [T, sum of out_sizes]: one matrix, filled from one or more tensors of the checkpoint.

    Fused projections read their input once. Memory for a layer's tensors is taken when the first of them arrives, and
    they are packed when the last one has, so that loading holds one unpacked layer at a time.

    Args:
        context: the model's.
        in_size: columns; a `Shard` where this rank holds some of them.
        out_sizes: rows of each fused part, in order; a `Shard` where this rank holds some of them.
        names: the checkpoint's name of each part, without ".weight" and ".bias"; one name where the checkpoint has all
            parts in one tensor, one after another.
        bias: whether every part has one.
        adds_bias: False where another rank adds the bias, which is then passed over here.
        kind: of layer, as `engine.interfaces.quantization` has them; None is never quantised.
        orders: see `LayerShape`.
        adapted: what adapters are asked for; None: a linear layer of this shape.

    Attributes:
        shape: what this rank holds.
    """

    kind: ClassVar[str | None] = None

    def __init__(
        self,
        context: ModelContext,
        in_size: int | Shard,
        out_sizes: Sequence[int | Shard],
        names: Sequence[str],
        bias: bool,
        *,
        adds_bias: bool = True,
        kind: str | None = None,
        orders: Mapping[str, Sequence[int]] = MappingProxyType({}),
        adapted: LayerShape | None = None,
    ) -> None:
        self.shape = LayerShape(
            names=tuple(names),
            kind=kind or self.kind or "",
            inputs=Shard.of(in_size),
            outputs=tuple(Shard.of(size) for size in out_sizes),
            bias=bias and adds_bias,
            orders=orders,
        )
        self._passed_over = frozenset(f"{name}.bias" for name in names if bias and not adds_bias)
        self._quantization = _quantization_of(context, self.shape)
        self._form: Quantization | _Plain = self._quantization or _Plain(context.ops)
        self._linear = self._form.linear
        self._adapter = None if context.adapters is None else context.adapters.layer(adapted or self.shape)
        self._dtype = context.dtype
        self._device = context.device
        self._lengths: Counter[str] = Counter()
        self._tensors: dict[str, torch.Tensor] = {}
        self._packed: Any = None

    def params(self) -> list[Param]:
        """The tensors of the form in which the layer is stored, with this rank's cut: where it is plain `<name>.weight`
        [out, in] and, with a bias, `<name>.bias` [out] for each name."""
        self._lengths.clear()
        params = []
        for stored in self._form.tensors(self.shape):
            key = stored, self._lengths[stored.key]
            params.append(Param(stored.name, stored.shape, self, key, stored.pieces, stored.dtypes))
            self._lengths[stored.key] += (params[-1].local_shape or (1,))[stored.along]
        return params

    def tolerated(self) -> frozenset[str]:
        """The biases that another rank adds."""
        return self._passed_over

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy a tensor to its place among those of its key. Raises UnsupportedModelError where its rows belong into
        another order, and are not stored one by one."""
        stored, start = param.key
        order = next((rows for part, rows in self.shape.orders.items() if stored.name.startswith(f"{part}.")), None)
        if order is not None and tensor.ndim and stored.in_order:
            if stored.along != 0 or len(tensor) != len(order):
                raise UnsupportedModelError(
                    f"load {stored.name}",
                    "its rows belong into another order, and the checkpoint stores several of them as one",
                    "use a checkpoint that stores this layer plain",
                )
            tensor = tensor[list(order)]
        tensor = torch.atleast_1d(tensor)
        if stored.shape == (-1,):
            self._lengths[stored.key] = len(tensor)
        if stored.key not in self._tensors:
            shape = list(tensor.shape)
            shape[stored.along] = self._lengths[stored.key]
            dtype = self._dtype if stored.cast else tensor.dtype
            self._tensors[stored.key] = staging(tuple(shape), dtype, self._device)
        self._tensors[stored.key].narrow(stored.along, start, tensor.shape[stored.along]).copy_(tensor)

    def finish(self) -> None:
        """Pack, and drop the unpacked tensors."""
        tensors, self._tensors = self._tensors, {}
        self._packed = self._form.pack(self.shape, tensors)

    def num_elements(self) -> int:
        """Of the matrix and the bias, however they are stored."""
        return sum(part.length for part in self.shape.outputs) * (self.shape.inputs.length + self.shape.bias)

    def own_bytes(self, itemsize: int) -> int:
        """As the quantization driver packed them, else as `Module.own_bytes`."""
        if self._quantization is None or self._packed is None:
            return super().own_bytes(itemsize)
        return self._quantization.packed_bytes(self._packed)

    @property
    def matrix(self) -> Any:
        """What was packed, where its product is all that a call gives; else None."""
        return self._packed if self._adapter is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_size] -> [T, sum of out_sizes]."""
        y = self._linear(x, self._packed)
        return y if self._adapter is None else self._adapter.add(x, y)


class _Plain:
    """Plain weights, which the ops driver packs and multiplies."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.linear = ops.linear

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        return plain_tensors(layer, cast=True)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        if layer.kind == EMBEDDING:
            return tensors["weight"]
        return self._ops.pack_linear(tensors["weight"], tensors.get("bias"))

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
        ops = self._ops
        return ops.embedding(ids, weight) if first is None else ops.embedding_part(ids, weight, first)


def _quantization_of(context: ModelContext, shape: LayerShape) -> Quantization | None:
    """Who packs a layer; None: the ops. Raises UnsupportedModelError where the checkpoint stores its parts unlike."""
    found = context.quantization.get(shape.kind)
    if found is None or context.covers is None:
        return found
    covered = {name: context.covers(name, shape.kind) for name in shape.names}
    if len(set(covered.values())) > 1:
        plain = ", ".join(name for name in shape.names if not covered[name])
        raise UnsupportedModelError(
            f"load {', '.join(shape.names)} as one matrix",
            f"by quantization_config of config.json {plain} is stored plain, and the others are not",
            "use a checkpoint that stores them alike",
        )
    return found if all(covered.values()) else None


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are divided over ranks: y_rank = x @ weight[rows of this rank].T."""

    kind = "linear"

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, bias: bool = False) -> None:
        super().__init__(context, in_size, [even(out_size, context, name)], [name], bias)


class RowParallelLinear(Linear):
    """A linear layer whose inputs are divided over ranks, and whose outputs are summed: every rank has the whole.

    Rank 0 adds the bias, once.
    """

    kind = "linear"

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, bias: bool = False) -> None:
        columns = even(in_size, context, name)
        super().__init__(context, columns, [out_size], [name], bias, adds_bias=context.tp_rank == 0)
        self._group = group_of(context)

    @property
    def matrix(self) -> Any:
        """None over several ranks, whose products are summed."""
        return super().matrix if self._group is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_size / ranks] -> [T, out_size]."""
        y = super().__call__(x)
        return y if self._group is None else self._group.all_reduce(y)


class MergedColumnLinear(Linear):
    """Several column-parallel layers over one input, in one matrix; the outputs follow one another (gate, up).

    Args:
        out_sizes: of the whole model.
        names: the checkpoint's, e.g. ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]; or one for all,
            e.g. ["model.layers.0.mlp.gate_up_proj"].
    """

    kind = "linear"

    def __init__(
        self, context: ModelContext, in_size: int, out_sizes: Sequence[int], names: Sequence[str], bias: bool = False
    ) -> None:
        assert len(names) in (1, len(out_sizes))
        local = [even(size, context, f"part {i} of {', '.join(names)}") for i, size in enumerate(out_sizes)]
        super().__init__(context, in_size, local, names, bias)


class QKVLinear(Linear):
    """Query, key and value projections in one matrix, divided over ranks by heads.

    A rank has the KV heads that its queries read; where there are fewer KV heads than ranks, several have the same.

    Args:
        num_q_heads, num_kv_heads: of the whole model.
        name: of the attention block, e.g. "model.layers.0.self_attn"; `parts` are the projections' names in it, or
            one name where the checkpoint has the three in one tensor.
        interleaved: so many of the first elements of each query's and key's head are rotary pairs that the checkpoint
            has as neighbours (2 i, 2 i + 1): loading puts their rows into halves, as `Ops.rope` has them.

    Attributes:
        num_q_heads, num_kv_heads: on this rank.
    """

    kind = "linear"

    def __init__(
        self,
        context: ModelContext,
        in_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        name: str,
        bias: bool = False,
        parts: tuple[str, str, str] | tuple[str] = ("q_proj", "k_proj", "v_proj"),
        interleaved: int = 0,
    ) -> None:
        q = even(num_q_heads, context, f"the query heads of {name}")
        kv = kv_heads(num_kv_heads, context, f"the KV heads of {name}")
        self.num_q_heads = q.length
        self.num_kv_heads = kv.length
        self.head_size = head_size
        shards = [heads.of_units(head_size) for heads in (q, kv, kv)]
        self._widths = [shard.length for shard in shards]
        names = [f"{name}.{part}" for part in parts]
        orders: dict[str, list[int]] = {}
        if interleaved:
            head = [*range(0, interleaved, 2), *range(1, interleaved, 2), *range(interleaved, head_size)]
            turned = [start + row for start in range(0, sum(self._widths[:2]), head_size) for row in head]
            if len(names) == 1:
                orders[names[0]] = [*turned, *range(len(turned), sum(self._widths))]
            else:
                orders |= {part: turned[:width] for part, width in zip(names[:2], self._widths, strict=False)}
        super().__init__(context, in_size, shards, names, bias, orders=orders)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x [T, in_size] -> q [T, num_q_heads, head_size], k and v [T, num_kv_heads, head_size], all views."""
        return self.parted(super().__call__(x))

    def parted(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The product [T, sum of out_sizes] as q, k and v."""
        q, k, v = torch.split(y, self._widths, dim=-1)
        size = self.head_size
        return (
            q.unflatten(-1, (self.num_q_heads, size)),
            k.unflatten(-1, (self.num_kv_heads, size)),
            v.unflatten(-1, (self.num_kv_heads, size)),
        )
