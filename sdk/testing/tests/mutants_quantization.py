"""Quantization drivers with one planted fault each, in the place of the reference driver's body, or of its card."""

from __future__ import annotations

import torch
from mutant_suites import suites_of
from plain_quantization_cards import Overstates, SaysNothing, ServesEverything

from engine_reference.quantization_absmax.absmax import AbsmaxBody, Rounded
from engine_sdk.conformance import QuantizationConformance


class NoBias(AbsmaxBody):
    """the bias is left out"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        return super().linear(x, packed._replace(bias=None))


class Wraps(AbsmaxBody):
    """what is as large as the largest, with the other sign, has no code: it wraps round to the largest's"""

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        packed = super().pack(kind, weight, bias)
        beyond = (weight.float() / packed.scales).round() >= 128
        return packed._replace(codes=packed.codes.masked_fill(beyond, 0))


class OneScale(AbsmaxBody):
    """all outputs share the largest one's scale"""

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        packed = super().pack(kind, weight, bias)
        scale = packed.scales.abs().amax().clamp(min=1e-30)
        codes = (weight.float() / scale).round().clamp(-128, 127) + 128
        return packed._replace(codes=codes.to(torch.uint8), scales=torch.full_like(packed.scales, float(scale)))


class Truncates(AbsmaxBody):
    """weights lose two steps on one side of 0"""

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        packed = super().pack(kind, weight, bias)
        return packed._replace(codes=torch.where(packed.codes > 129, packed.codes - 2, packed.codes))


class ZeroMoves(AbsmaxBody):
    """what is 0 becomes half a step"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        steps = packed.scales.to(x.dtype)[:, 0] / 2
        return super().linear(x, packed) + x.sum(dim=1, keepdim=True) * steps


class LastColumn(AbsmaxBody):
    """the last input of an odd number is left out"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        if packed.inputs % 2 and packed.inputs > 1:
            x = torch.cat((x[:, :-1], torch.zeros_like(x[:, -1:])), dim=1)
        return super().linear(x, packed)


class DividesByZero(AbsmaxBody):
    """a group of zeros is divided by its scale of 0"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        out = super().linear(x, packed)
        return out + (0 / packed.scales[:, 0]).to(x.dtype)


class RowsTogether(AbsmaxBody):
    """rows are rounded to 8 bits by the largest of the whole batch"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        step = x.abs().amax() / 127 if x.numel() else x.new_ones(())
        return super().linear((x / step).round() * step if step > 0 else x, packed)


class RowsUnsaid(AbsmaxBody):
    """each row is rounded to 8 bits, and the card does not say so"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        step = x.abs().amax(dim=1, keepdim=True) / 127
        return super().linear(torch.where(step > 0, (x / step).round() * step, x), packed)


class WideResults(AbsmaxBody):
    """results are float32, whatever rows are"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        return super().linear(x, packed).float()


class NarrowSums(AbsmaxBody):
    """products are computed in bfloat16"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        bias = None if packed.bias is None else packed.bias.bfloat16()
        return super().linear(x.bfloat16(), packed._replace(bias=bias)).to(x.dtype)


class KeepsBias(AbsmaxBody):
    """the bias is kept as a view of what was given"""

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        return super().pack(kind, weight, bias)._replace(bias=bias)


class ScalesWeights(AbsmaxBody):
    """the weight is scaled in place"""

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        packed = super().pack(kind, weight, bias)
        weight *= 0.5
        return packed


class ChangesRows(AbsmaxBody):
    """rows are rounded in place"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        out = super().linear(x, packed)
        x.mul_(1.5)
        return out


class IgnoresStrides(AbsmaxBody):
    """rows are taken to lie one after the other"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        return super().linear(torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset()), packed)


class RoundsByChance(AbsmaxBody):
    """weights are rounded up or down by chance"""

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        packed = super().pack(kind, weight, bias)
        steps = torch.where(packed.scales == 0, 0.0, weight.float() / packed.scales)
        codes = torch.where(steps == steps.round(), steps, (steps + torch.rand(steps.shape)).floor()).clamp(-128, 127)
        return packed._replace(codes=(codes + 128).to(torch.uint8))


class OneBuffer(AbsmaxBody):
    """layers of the same size share the last one's scales"""

    _scales: torch.Tensor | None = None

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        packed = super().pack(kind, weight, bias)
        self._scales = packed.scales
        return packed

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        assert self._scales is not None
        same = self._scales.shape == packed.scales.shape
        return super().linear(x, packed._replace(scales=self._scales) if same else packed)


class PlainBytes(AbsmaxBody):
    """packed_bytes says what the weights took before"""

    def packed_bytes(self, packed: Rounded) -> int:
        return packed.codes.numel() * 2


class TakesAnything(AbsmaxBody):
    """what is no layer is made one"""

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        outputs = weight.shape[0]
        added = None if bias is None else torch.nn.functional.pad(bias.flatten(), (0, outputs))[:outputs]
        return super().pack(kind, weight.reshape(outputs, -1), added)


class HeadsAreHalf(AbsmaxBody):
    """heads are packed with half their weights' size"""

    def pack(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Rounded:
        packed = super().pack(kind, weight, bias)
        return packed._replace(scales=packed.scales / 2) if kind == "head" else packed


class FirstRowTwice(AbsmaxBody):
    """with more than 16 rows, the 17th is computed from the first"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        out = super().linear(x, packed)
        if len(x) > 16:
            out[16] = out[0]
        return out


MUTANTS = [
    NoBias, Wraps, OneScale, Truncates, ZeroMoves, LastColumn, DividesByZero, RowsTogether, RowsUnsaid, WideResults,
    NarrowSums, KeepsBias, ScalesWeights, ChangesRows, IgnoresStrides, RoundsByChance, OneBuffer, PlainBytes,
    TakesAnything, HeadsAreHalf, FirstRowTwice, Overstates, SaysNothing, ServesEverything,
]  # fmt: skip

globals().update(suites_of(QuantizationConformance, "absmax", MUTANTS))
