"""Weights rounded by the largest of their group, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.interfaces.context import WorkerContext
from engine.interfaces.quantization import LayerShape, StoredTensor, plain_tensors
from engine_kit.plain_layer import plain_layer
from engine_reference.quantization_absmax.card import AbsmaxOptions


class Rounded(NamedTuple):
    """A layer: weight[o, i] = scales[o, i // group] * (codes[o, i] - 2 ** (bits - 1)).

    Args:
        codes: uint8 [O, padded I]; of 4 bits [O, padded I / 2], the earlier one of a pair in the low half.
        scales: [O, groups]; float32 for one group, float16 for several.
        inputs: I.
        bias: [O] or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    inputs: int
    bias: torch.Tensor | None


class AbsmaxBody:
    """See `engine.interfaces.quantization.Quantization`."""

    def __init__(self, context: WorkerContext) -> None:
        options: AbsmaxOptions = context.options
        self._bits = options.bits
        self._group_size = options.group_size

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """A plain layer's."""
        return plain_tensors(layer)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        """The same way for layers of every kind."""
        weight, bias = plain_layer(layer, tensors)
        codes, scales = quantize(weight, self._bits, self._group_size)
        if self._bits == 4:
            codes = F.pad(codes, (0, codes.shape[1] % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return Rounded(codes, scales, weight.shape[1], None if bias is None else bias.clone())

    def packed_bytes(self, packed: Rounded) -> int:
        """Codes, scales and bias."""
        return sum(t.nbytes for t in (packed.codes, packed.scales, packed.bias) if t is not None)

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        """x [T, I] -> [T, O]; the weights become x's dtype before they meet x, which is not rounded."""
        codes = packed.codes
        if self._bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = dequantize(codes, packed.scales.to(wide), packed.inputs, self._bits, self._group_size)
        return F.linear(x, weight.to(x.dtype), packed.bias)


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each group of inputs to 2 ** bits steps, such that the one farthest from 0 is exact (as Q4_0 of ggml does).

    With m that one, scale = m / -2 ** (bits - 1), and code = round(w / scale) + 2 ** (bits - 1), at most 2 ** bits - 1.
    A group of zeros has scale 0.

    Args:
        weight: [O, I].
        group_size: inputs that share a scale; 0: all. The last group is filled up with zeros.

    Returns:
        codes uint8 [O, I rounded up to whole groups]; scales [O, groups], float32 for one
        group and float16 for several.
    """
    outputs, inputs = weight.shape
    size = group_size or max(1, inputs)
    wide = F.pad(weight.float(), (0, -inputs % size)).view(outputs, -1, size)
    high, low, half = wide.amax(dim=2), wide.amin(dim=2), 2 ** (bits - 1)
    scales = torch.where(high >= -low, high, low) / -half
    if group_size:
        scales = scales.half()
    divisor = scales.float().unsqueeze(2)
    steps = torch.where(divisor == 0, 0.0, wide / divisor).round_().clamp_(-half, half - 1)
    return (steps + half).to(torch.uint8).view(outputs, -1), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, inputs: int, bits: int, group_size: int) -> torch.Tensor:
    """What codes [O, at least inputs] and scales [O, groups] stand for: [O, inputs] in the scales' dtype."""
    groups = scales.shape[1]
    steps = codes[:, : groups * (group_size or codes.shape[1] // max(1, groups))].to(scales.dtype) - 2 ** (bits - 1)
    return (steps.view(codes.shape[0], groups, -1) * scales.unsqueeze(2)).flatten(1)[:, :inputs]
