"""The weights of routed experts on one rank: loaded, put together, and computed with.

Plain ones of all experts become one stack, which the operation `pack_experts` takes as soon as it is whole. Those that
a quantization stores are packed one by one, as they come, and then joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from engine.interfaces.model import ModelContext
from engine.interfaces.quantization import LayerShape, Quantization, StoredTensor, plain_tensors
from engine.modeling import Linear, Module, Param
from engine.modeling.loading import staging
from engine.types.errors import UnsupportedModelError
from engine.types.parallel import Shard
from engine_kit.by_expert import Rows
from engine_kit.routing import AdaptsExperts, ExpertAdapters, ExpertQuantization, ExpertSpec


class ExpertWeights(Module):
    """What a rank holds of a layer's experts: a part of the inner size of some of them.

    Args:
        experts: their numbers in the checkpoint, in the order in which they are held.
        inner: this rank's part.
        adds_bias: False where another rank adds the biases of the second projection.
    """

    def __init__(
        self, context: ModelContext, spec: ExpertSpec, experts: Sequence[int], inner: Shard, adds_bias: bool
    ) -> None:
        self._ops: Any = context.ops
        self._act = spec.act
        parts, size = [inner] * (2 if spec.act.gated else 1), spec.hidden_size
        stacks = _Stack(context, len(experts)), _Stack(context, len(experts))
        make = StackedExpert if spec.stacked else ExpertLinear

        def linear(place: int, last: bool) -> ExpertLinear:
            sizes: Any = (inner, [size]) if last else (size, parts)
            names = [name.replace("{}", str(experts[place])) for name in ((spec.last,) if last else spec.first)]
            given = (context, *sizes, names, spec.bias, adds_bias or not last)
            return make(*given, done=self._one_more)

        self.first = [linear(place, False) for place in range(len(experts))]
        self.last = [linear(place, True) for place in range(len(experts))]
        self._adapters: ExpertAdapters | None = None
        if hasattr(context.adapters, "experts"):
            first, last = ([one.shape for one in side] for side in (self.first, self.last))
            whole = len(experts) == spec.num_experts
            self._adapters = cast("AdaptsExperts", context.adapters).experts(first, last, spec.stacked, whole)
        if self._adapters is None:
            for side, stack in zip((self.first, self.last), stacks, strict=True):
                for place, one in enumerate(side):
                    one.join(stack, place)
        self.tensors: list[StackedTensor] = []
        if spec.stacked:
            kind, every = (TurnedTensor if spec.stacked == "turned" else StackedTensor), spec.num_experts
            names = (spec.first[0], spec.last)
            self.tensors = [
                kind(of, experts, every, name) for of, name in zip((self.first, self.last), names, strict=True)
            ]
        self._quantization = self._one_form()
        self._stacks = stacks
        self._left = 2 * len(experts)
        self._packed: Any = None
        self._compute: Callable[..., torch.Tensor] = self._by_expert

    def _one_form(self) -> Quantization | None:
        """The form of all projections. Raises UnsupportedModelError where they are stored unlike."""
        every = [*self.first, *self.last]
        form = every[0].quantization
        for linear in every:
            if linear.quantization is not form:
                names = [", ".join(one.shape.names) for one in (every[0], linear)]
                raise UnsupportedModelError(
                    f"load {names[0]} and {names[1]} as experts of one layer",
                    "by quantization_config of config.json one is stored plain, and the other is not",
                    "use a checkpoint that stores them alike",
                )
        return form

    def _one_more(self) -> None:
        """A projection of an expert is there."""
        self._left -= 1
        if self._left:
            return
        if self._adapters is not None:
            return
        if self._quantization is None:
            first, last = self._stacks
            self._packed = self._ops.pack_experts(first.weight, last.weight, first.bias, last.bias)
            self._compute = self._ops.experts
            first.clear()
            last.clear()
        elif hasattr(self._quantization, "pack_experts"):
            pairs = [(first.packed, last.packed) for first, last in zip(self.first, self.last, strict=True)]
            grouped = cast("ExpertQuantization", self._quantization)
            self._packed = grouped.pack_experts(pairs)
            self._compute = grouped.experts

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As operation `experts`, ids being places among those that are held: what this rank's part gives, to be summed
        over those who have the others."""
        return self._compute(x, self._packed, ids, weights, self._act)

    @property
    def loaded(self) -> bool:
        """Every projection of every expert is there. Of a layer of another pipeline stage none comes."""
        return not self._left

    def tensors_at(self, place: int) -> list[torch.Tensor] | None:
        """The memory of one expert's weights, which holds another's when that is written over it; None where whoever
        packed them does not tell (`engine_kit.routing.TellsTensors`)."""
        tensors = getattr(self._packed, "tensors", None)
        return None if tensors is None else list(tensors(place))

    def _by_expert(
        self, x: torch.Tensor, packed: Any, ids: torch.Tensor, weights: torch.Tensor, act: Any
    ) -> torch.Tensor:
        """The same of a quantization that multiplies single layers alone, and with adapters."""
        if not len(x):
            return x
        rows = Rows.of(x, ids, len(self.first))
        adapted = None if self._adapters is None else self._adapters.rows(rows.token, rows.expert)

        def projected(last: bool, x: torch.Tensor) -> torch.Tensor:
            side = self.last if last else self.first
            y = rows.each(x, lambda place, some: side[place](some))
            return y if self._adapters is None else self._adapters.add(last, x, y, adapted)

        return rows.summed(projected(True, self._ops.gated_act(projected(False, rows.x), act)), weights)


class _Stack:
    """The plain tensors of one projection of all experts: `weight` [E, out, in], `bias` [E, out] or None."""

    def __init__(self, context: ModelContext, count: int) -> None:
        self._count = count
        self._device = context.device
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def put(self, place: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy those of an expert, "weight" and "bias"."""
        for key, tensor in tensors.items():
            if getattr(self, key) is None:
                setattr(self, key, staging((self._count, *tensor.shape), tensor.dtype, self._device))
            getattr(self, key)[place].copy_(tensor)

    def clear(self) -> None:
        """Let go of them."""
        self.weight = self.bias = None


class _Slot:
    """A place in a stack, as a linear layer's form."""

    def __init__(self, stack: _Stack, place: int) -> None:
        self._stack = stack
        self._place = place

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        return plain_tensors(layer, cast=True)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> None:
        self._stack.put(self._place, tensors)


class ExpertLinear(Linear):
    """A projection of one expert. Its tensors go into the stack of all experts, or are packed by the quantization.

    Args:
        done: called when the tensors are where they belong.
    """

    def __init__(
        self,
        context: ModelContext,
        in_size: int | Shard,
        out_sizes: Sequence[int | Shard],
        names: Sequence[str],
        bias: bool,
        adds_bias: bool,
        *,
        done: Callable[[], None],
    ) -> None:
        super().__init__(context, in_size, out_sizes, names, bias, adds_bias=adds_bias, kind="expert")
        if self._adapter is not None:
            found = "it is one of a layer's experts, which are computed together"
            raise UnsupportedModelError(f"adapt {', '.join(names)}", found, "leave the experts out of the adapters")
        self._done = done

    def join(self, stack: _Stack, place: int) -> None:
        """Plain tensors go there."""
        if self._quantization is None:
            self._form = cast(Any, _Slot(stack, place))

    @property
    def quantization(self) -> Quantization | None:
        """Who packs it; None where it is plain."""
        return self._quantization

    @property
    def packed(self) -> Any:
        """What the quantization made of it."""
        return self._packed

    def finish(self) -> None:
        """All of its tensors have come."""
        super().finish()
        self._done()


class StackedExpert(ExpertLinear):
    """One whose tensor is a part of one that it shares with others, see `StackedTensor`."""

    def stored(self) -> Sequence[StoredTensor]:
        """What its form is made of."""
        return self._form.tensors(self.shape)

    def params(self) -> list[Param]:
        """None of its own."""
        return []

    def take(self, key: str, tensor: torch.Tensor) -> None:
        """Its part of the checkpoint's tensor, all ranks': "weight" [out, in] or another of its form, or "bias" [out],
        which another rank may add."""
        for param in super().params():
            if param.key[0].key == key:
                self.load(param, param.cut(tensor))

    def pack(self) -> None:
        """All is taken."""
        super().finish()

    def finish(self) -> None:
        """Who has its tensors packs it."""


class StackedTensor(Module):
    """The checkpoint's one tensor of a projection of all experts, `<name>.weight` [E, out, in].

    Args:
        linears: the experts that are held, and `experts` their numbers, of `count`.
    """

    def __init__(self, linears: Sequence[Any], experts: Sequence[int], count: int, name: str) -> None:
        self.linears: list[StackedExpert] = list(linears)
        self._experts = experts
        self._count = count
        self._name = name

    def params(self) -> list[Param]:
        """The tensor, whole on every rank: each expert cuts its own part. Raises UnsupportedModelError for weights in a
        form of their own: no tool stores them so."""
        shape, keys = self.linears[0].shape, {stored.key for stored in self.linears[0].stored()}
        if not keys <= {"weight", "bias"}:
            raise UnsupportedModelError(
                f"load {self._name}, all experts in one tensor",
                f"by quantization_config of config.json it is stored as {', '.join(sorted(keys))}",
                "use a checkpoint with plain weights, or with one tensor for each expert",
            )
        outputs = sum(part.total for part in shape.outputs)
        return [Param(f"{self._name}.weight", (self._count, outputs, shape.inputs.total), self)]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Give each its part."""
        for linear, expert in zip(self.linears, self._experts, strict=True):
            linear.take("weight", tensor[expert])
            linear.pack()

    def num_elements(self) -> int:
        """None beside the layers'."""
        return 0


class TurnedTensor(StackedTensor):
    """The same stored turned and with biases, `<name>` [E, in, out] and `<name>_bias` [E, out]; where there are two
    parts, such as gate and up, their outputs take turns (gpt-oss). Tensors of a form of their own are `<name>_<key>`
    [E, out, ...]."""

    def params(self) -> list[Param]:
        """All, whole on every rank."""
        linear = self.linears[0]
        outputs = sum(part.total for part in linear.shape.outputs)
        found = [Param(f"{self._name}_bias", (self._count, outputs), self, "bias")]
        for stored in linear.stored():
            if stored.key == "weight":
                found.append(Param(self._name, (self._count, *stored.shape[::-1]), self, "weight"))
            elif stored.key != "bias":
                name, shape = f"{self._name}_{stored.key}", (self._count, *stored.shape)
                found.append(Param(name, shape, self, stored.key, dtypes=stored.dtypes))
        return found

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Give each its part, with all outputs of one part before those of the next."""
        for linear, expert in zip(self.linears, self._experts, strict=True):
            rows = tensor[expert].T if param.key == "weight" else tensor[expert]
            turns = rows.reshape(-1, len(linear.shape.outputs), *rows.shape[1:])
            linear.take(param.key, turns.transpose(0, 1).flatten(0, 1))

    def finish(self) -> None:
        """Pack them."""
        for linear in self.linears:
            linear.pack()
