"""Engine's layers in the places of transformers' own, and the holder of all weights that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from engine.interfaces.model import ModelContext
from engine.interfaces.quantization import PLAIN_DTYPES
from engine.modeling import (
    ColumnParallelLinear,
    Embedding,
    Linear,
    LMHead,
    MergedColumnLinear,
    Module,
    Param,
    RowParallelLinear,
)
from engine.modeling.parallel import even, group_of
from engine.types.errors import UnsupportedModelError


class InPlace(nn.Module):
    """A layer of the engine where a layer of transformers' was.

    Args:
        context: the model's.
        call: x [n, in_size] -> [n, out_size], or ids [n] -> [n, hidden_size].
        rows: how many of the input's dimensions, from the last, belong to one row.

    Attributes:
        weight: empty: of the dtype and on the device that modules around it ask for. The weight itself is packed.
    """

    def __init__(self, context: ModelContext, call: Callable[[torch.Tensor], torch.Tensor], rows: int = 1) -> None:
        super().__init__()
        self._call = call
        self._rows = rows
        self.weight = torch.empty(0, dtype=context.dtype, device=context.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_size] -> [..., out_size], or [...] -> [..., hidden_size]."""
        before = x.shape[: x.ndim - self._rows]
        out = self._call(x.reshape(-1, *x.shape[len(before) :]))
        return out.view(*before, out.shape[-1])


class GatheredLinear(Module):
    """A column-parallel layer whose outputs every rank has whole."""

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, bias: bool) -> None:
        self.linear = ColumnParallelLinear(context, in_size, out_size, name, bias)
        self._group = group_of(context)
        self._sizes = (out_size // context.tp_size,) * context.tp_size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_size] -> [T, out_size]."""
        y = self.linear(x)
        return y if self._group is None else self._group.all_gather(y, 1, self._sizes)


class SplitLinear(Module):
    """A row-parallel layer whose inputs every rank has whole."""

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, bias: bool) -> None:
        self.linear = RowParallelLinear(context, in_size, out_size, name, bias)
        self._columns = even(in_size, context, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_size] -> [T, out_size]."""
        return self.linear(x.narrow(1, self._columns.start, self._columns.length))


Divided = Linear | GatheredLinear | SplitLinear


def divided(context: ModelContext, style: str | None, layer: nn.Linear, name: str) -> Divided:
    """The engine's layer for a linear one, divided over ranks as a style of transformers' plans says.

    Raises:
        UnsupportedModelError: for a style that is not known here.
        ConfigError: what is to be divided does not divide.
    """
    sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
    if style is None or context.tp_size == 1:
        return Linear(context, sizes[0], [sizes[1]], [name], bias, kind="linear")
    if style == "packed_colwise":
        return MergedColumnLinear(context, sizes[0], [sizes[1] // 2] * 2, [name], bias)
    made = STYLES.get(style)
    if made is None:
        raise UnsupportedModelError(
            f"divide {name} over {context.tp_size} ranks",
            f"transformers' plan for it is {style!r}; known here are {', '.join(sorted([*STYLES, 'packed_colwise']))}",
            "leave --tensor-parallel-size out, or install a driver that is made for the model",
        )
    return made(context, *sizes, name, bias)


STYLES: dict[str, Callable[[ModelContext, int, int, str, bool], Divided]] = {
    "colwise": ColumnParallelLinear,
    "rowwise": RowParallelLinear,
    "colwise_gather_output": GatheredLinear,
    "rowwise_split_input": SplitLinear,
}
"""A style of transformers' tensor parallel plans -> the engine's layer."""


class LookedUp(nn.Embedding):
    """Below a class of transformers that does something to rows (scales them, say) once `super().forward` has looked
    them up: the table is the engine's."""

    table: InPlace

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> [..., hidden_size]."""
        rows: torch.Tensor = self.table(ids)
        return rows


def look_up_by(held: nn.Embedding, table: InPlace) -> None:
    """Put the engine's table below the class of an embedding, which keeps no matrix of its own."""
    kind = type(held)
    del held.weight
    held.weight = table.weight  # no parameter: nothing is loaded into it
    held.table = table
    held.__class__ = type(kind.__name__, (kind, LookedUp), {})


def head(context: ModelContext, layer: nn.Linear, name: str, tied: Embedding | None) -> LMHead:
    """The engine's head for the last linear layer, whose rows are divided over ranks."""
    return LMHead(context, layer.out_features, layer.in_features, name, tied, bias=layer.bias is not None)


class Held(Module):
    """The weights and buffers that stay in transformers' modules: norms, experts, tables of positions.

    Args:
        context: the model's.
        model: transformers'; what has been replaced in it is not here any more.
        built_in: the dtype of weights that are to have the context's; others have the one that their module wants.
    """

    def __init__(self, context: ModelContext, model: nn.Module, built_in: torch.dtype) -> None:
        self._context = context
        self._built_in = built_in
        self._params = list(self._found(model))

    def _found(self, model: nn.Module) -> Iterator[Param]:
        seen: set[int] = set()
        for place, module in model.named_modules():
            for kind, tensors in (("_parameters", module._parameters), ("_buffers", module._buffers)):
                for key, tensor in tensors.items():
                    if tensor is None or id(tensor) in seen or key in module._non_persistent_buffers_set:
                        continue
                    seen.add(id(tensor))
                    name, own = f"{place}.{key}" if place else key, {str(tensor.dtype).removeprefix("torch.")}
                    dtypes = PLAIN_DTYPES if tensor.is_floating_point() else frozenset(own)
                    yield Param(name, tuple(tensor.shape), self, (module, kind, key), dtypes=dtypes)

    def params(self) -> list[Param]:
        """All of them."""
        return self._params

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy it to the device, in the model's dtype, or the one that its module wants."""
        module, kind, key = param.key
        built = getattr(module, kind)[key].dtype
        dtype = self._context.dtype if built == self._built_in else built
        kept = torch.empty(tensor.shape, dtype=dtype, device=self._context.device).copy_(tensor)
        getattr(module, kind)[key] = nn.Parameter(kept, requires_grad=False) if kind == "_parameters" else kept
