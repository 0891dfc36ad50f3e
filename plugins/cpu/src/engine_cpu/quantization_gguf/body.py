"""Weights in ggml's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from engine.interfaces.quantization import LayerShape, StoredTensor
from engine.types.errors import UnsupportedModelError
from engine_cpu.packed import Packed, PackedLinear
from engine_cpu.packed_experts import ExpertProducts, PackedExperts, joined
from engine_kit.ggml_blocks import TYPES, block_tensors, type_of

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cpu.levels import LevelOptions
    from engine_kit.routing import ExpertAct


@dataclass(frozen=True, slots=True)
class Parts:
    """A layer.

    Args:
        parts: its outputs one after another; neighbours of one type are together.
        outputs: of all.
    """

    parts: tuple[Packed, ...]
    outputs: int


class GGUFBody:
    """See `engine.interfaces.quantization.Quantization`."""

    def __init__(self, context: WorkerContext) -> None:
        options: LevelOptions = context.options
        self._config = context.start.model.config
        self._dtype: torch.dtype = getattr(torch, context.start.dtype)
        self._layers = PackedLinear("quantization", options.level)
        self._products = ExpertProducts(options.level)

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """Each part's blocks, and the bias."""
        return block_tensors(layer, self._config)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Parts:
        """The blocks of all parts, put into the order of panels. Plain ones of another dtype than activations have, but
        for float16, become theirs."""
        bias = tensors.get("bias")
        kinds = [type_of(self._config, name) for name in layer.names]
        parts, start = list[Packed](), 0
        for kind, places in groupby(range(len(kinds)), lambda place: kinds[place]):
            weights = [tensors[f"weight.{place}"] for place in places]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            stop = start + len(weight)
            added = None if bias is None else bias[start:stop]
            if not TYPES[kind].plain:
                inputs = weight.shape[1] * TYPES[kind].inputs
                parts.append(self._layers.pack_blocks(kind.lower(), weight.flatten(1), inputs, added))
            elif kind == "F16":
                parts.append(self._layers.pack("float16", weight, added))
            else:
                parts.append(self._layers.pack(str(self._dtype)[6:], weight.to(self._dtype), added))
            start = stop
        return Parts(tuple(parts), start)

    def linear(self, x: torch.Tensor, packed: Parts) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype; each row is rounded to 8 bits by itself where it meets blocks."""
        if len(packed.parts) == 1:
            return self._layers.linear(x, packed.parts[0])
        out, start = x.new_empty((len(x), packed.outputs)), 0
        for part in packed.parts:
            self._layers.linear(x, part, out[:, start : start + part.outputs])
            start += part.outputs
        return out

    def embedding(self, ids: torch.Tensor, packed: Parts, first: int | None) -> torch.Tensor:
        """ids int [T] -> [T, H], exactly what their rows stand for, rounded to the engine's dtype."""
        (table,) = packed.parts
        return self._layers.look_up(ids, table, self._dtype, first)

    def pack_experts(self, experts: Sequence[tuple[Parts, Parts]]) -> PackedExperts:
        """Both projections of each, packed -> what `experts` takes.

        Raises UnsupportedModelError where a projection's gate and up are stored in different types.
        """
        sides = [len(side.parts) for pair in experts for side in pair]
        if max(sides) > 1:
            raise UnsupportedModelError(
                "compute a layer's experts together",
                "the file stores gates and ups of its experts in different types",
                "use a file that stores them alike, or name --quantization gguf, which multiplies one by one",
            )
        return joined([(first.parts[0], last.parts[0]) for first, last in experts])

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights float32 [T, k] -> [T, H]; rows are rounded in front of each product."""
        return self._products.experts(x, packed, ids, weights, act)

    def packed_bytes(self, packed: Parts) -> int:
        """Blocks and bias, with their padding."""
        return sum(part.nbytes for part in packed.parts)
