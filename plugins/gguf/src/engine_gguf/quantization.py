"""Layers of ggml's blocks in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.interfaces.context import WorkerContext
from engine.interfaces.quantization import LayerShape, StoredTensor
from engine_gguf.dequantize import dequantize
from engine_kit.ggml_blocks import block_tensors, type_of


class Stored(NamedTuple):
    """A layer: its parts one after another, each with its type, and the bias [O] or None."""

    parts: tuple[tuple[str, torch.Tensor], ...]
    bias: torch.Tensor | None


class GGUFQuantizationBody:
    """See `engine.interfaces.quantization.Quantization`."""

    def __init__(self, context: WorkerContext) -> None:
        self._config = context.start.model.config
        self._dtype: torch.dtype = getattr(torch, context.start.dtype)

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """Each part's blocks, and the bias."""
        return block_tensors(layer, self._config)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Stored:
        """As it came."""
        kinds = [type_of(self._config, name) for name in layer.names]
        parts = tuple((kind, tensors[f"weight.{place}"].clone()) for place, kind in enumerate(kinds))
        bias = tensors.get("bias")
        return Stored(parts, None if bias is None else bias.clone())

    def packed_bytes(self, packed: Stored) -> int:
        """Blocks and bias."""
        return sum(t.nbytes for _, t in packed.parts) + (0 if packed.bias is None else packed.bias.nbytes)

    def linear(self, x: torch.Tensor, packed: Stored) -> torch.Tensor:
        """x [T, I] -> [T, O]; the weights become x's dtype before they meet x, which is not rounded."""
        weight = torch.cat([dequantize(blocks, kind, x.dtype) for kind, blocks in packed.parts])
        return F.linear(x, weight, packed.bias)

    def embedding(self, ids: torch.Tensor, packed: Stored, first: int | None) -> torch.Tensor:
        """ids int [T] -> [T, H], their rows alone worked out."""
        ((kind, blocks),) = packed.parts
        local = ids - (first or 0)
        outside = None if first is None else (local < 0) | (local >= len(blocks))
        rows = blocks[local if outside is None else local.masked_fill(outside, 0)]
        found = dequantize(rows, kind, self._dtype)
        return found if outside is None else found.masked_fill(outside[:, None], 0)
