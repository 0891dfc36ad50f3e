"""The body: codes are read as they are stored, and multiplied by 3 where they meet a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.quantization import LayerShape, StoredTensor


class Codes(NamedTuple):
    """A layer: weight = 3 * codes.

    Args:
        codes: int8 [O, I].
        bias: [O] or None.
    """

    codes: torch.Tensor
    bias: torch.Tensor | None


class Times3:
    """See `engine.interfaces.quantization.Quantization`."""

    def __init__(self, context: WorkerContext) -> None: ...

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """`<name>.third` int8 [O, I], and a plain bias."""
        bias = layer.stored("bias", inputs=0, cast=True) if layer.bias else []
        return layer.stored("third", dtypes=frozenset({"int8"})) + bias

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Codes:
        bias = tensors.get("bias")
        return Codes(tensors["third"].clone(), None if bias is None else bias.clone())

    def packed_bytes(self, packed: Codes) -> int:
        return sum(tensor.nbytes for tensor in packed if tensor is not None)

    def linear(self, x: torch.Tensor, packed: Codes) -> torch.Tensor:
        return functional.linear(x, 3 * packed.codes.to(x.dtype), packed.bias)
