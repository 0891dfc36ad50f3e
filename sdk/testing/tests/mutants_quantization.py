"""Quantization drivers with one planted fault each, in the place of the reference driver's body, or of its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from engine_times3.body import Codes, Times3
from engine_times3.card import Times3Card
from mutant_suites import suites_of
from plain_quantization_cards import (
    ClaimsEverything,
    ClaimsNothing,
    CoversEverything,
    CoversNothing,
    Overstates,
    PlainRoundingCard,
    SaysNothing,
    ServesEverything,
)
from plain_rounding import PlainRounding
from plain_stored import Times3Suite

from engine.interfaces.quantization import LayerShape, StoredTensor
from engine_reference.quantization_absmax.absmax import AbsmaxBody, Rounded
from engine_sdk.conformance import QuantizationConformance


class NoBias(AbsmaxBody):
    """the bias is left out"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        return super().linear(x, packed._replace(bias=None))


class Wraps(AbsmaxBody):
    """what is as large as the largest, with the other sign, has no code: it wraps round to the largest's"""

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        packed = super().pack(layer, tensors)
        beyond = (tensors["weight"].float() / packed.scales).round() >= 128
        return packed._replace(codes=packed.codes.masked_fill(beyond, 0))


class OneScale(AbsmaxBody):
    """all outputs share the largest one's scale"""

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        packed = super().pack(layer, tensors)
        scale = packed.scales.abs().amax().clamp(min=1e-30)
        codes = (tensors["weight"].float() / scale).round().clamp(-128, 127) + 128
        return packed._replace(codes=codes.to(torch.uint8), scales=torch.full_like(packed.scales, float(scale)))


class Truncates(AbsmaxBody):
    """weights lose two steps on one side of 0"""

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        packed = super().pack(layer, tensors)
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

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        return super().pack(layer, tensors)._replace(bias=tensors.get("bias"))


class ScalesWeights(AbsmaxBody):
    """the weight is scaled in place"""

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        packed = super().pack(layer, tensors)
        tensors["weight"].mul_(0.5)
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

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        packed = super().pack(layer, tensors)
        steps = torch.where(packed.scales == 0, 0.0, tensors["weight"].float() / packed.scales)
        codes = torch.where(steps == steps.round(), steps, (steps + torch.rand(steps.shape)).floor()).clamp(-128, 127)
        return packed._replace(codes=(codes + 128).to(torch.uint8))


class OneBuffer(AbsmaxBody):
    """layers of the same size share the last one's scales"""

    _scales: torch.Tensor | None = None

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        packed = super().pack(layer, tensors)
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

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        weight, bias = tensors["weight"], tensors.get("bias")
        outputs = weight.shape[0]
        made = {"weight": weight.reshape(outputs, -1)}
        if bias is not None:
            made["bias"] = torch.nn.functional.pad(bias.flatten(), (0, outputs))[:outputs]
        return super().pack(layer, made)


class HeadsAreHalf(AbsmaxBody):
    """heads are packed with half their weights' size"""

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Rounded:
        packed = super().pack(layer, tensors)
        return packed._replace(scales=packed.scales / 2) if layer.kind == "head" else packed


class FirstRowTwice(AbsmaxBody):
    """with more than 16 rows, the 17th is computed from the first"""

    def linear(self, x: torch.Tensor, packed: Rounded) -> torch.Tensor:
        out = super().linear(x, packed)
        if len(x) > 16:
            out[16] = out[0]
        return out


class AnyDtype(Times3):
    """codes of any dtype are taken"""

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        return [one._replace(dtypes=one.dtypes | {"int16"}) for one in super().tensors(layer)]


class WholeOnEachRank(Times3):
    """every rank takes the first rows, whichever are its own"""

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        outputs = tuple(part._replace(start=0) for part in layer.outputs)
        return super().tensors(layer._replace(outputs=outputs))


class LastPartFirst(Times3):
    """the parts of a fused layer are joined in the wrong order"""

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        return super().tensors(layer)[::-1]


class FirstColumns(Times3):
    """where inputs are divided, every rank takes the first ones"""

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        return super().tensors(layer._replace(inputs=layer.inputs._replace(start=0)))


class Doubles(Times3):
    """codes are taken for a half of the weights"""

    def linear(self, x: torch.Tensor, packed: Codes) -> torch.Tensor:
        return super().linear(x, packed) * 2 / 3


class BiasLost(Times3):
    """the bias is read, and never added"""

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Codes:
        return super().pack(layer, tensors)._replace(bias=None)


class SumIsNotRounded(PlainRounding):
    """where norms round rows they norm what is added up before it is rounded"""

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super().added(x, residual) if x.dtype == torch.float64 else x.float() + residual.float()


class OneScaleForAllRows(PlainRounding):
    """where norms round rows all rows of a step share a scale"""

    def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        codes, steps = super().normed(x, norm, eps)
        return (codes * steps / steps.amax()).round(), steps.amax().expand_as(steps)


class RoundsBeforeTheWeight(PlainRounding):
    """where norms round rows they do so before their weight is applied"""

    def weighed(self, normed: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        codes, steps = self.coded(normed)
        return (codes * steps).to(norm.dtype) * norm


class ActsOnTheSecondHalf(PlainRounding):
    """where the activation rounds rows it takes the second half for the gate"""

    def acted(self, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return super().acted(up, gate, dtype)


class RoundsTheActivationOnce(PlainRounding):
    """where the activation rounds rows it does so of what was not rounded to the rows' dtype"""

    def acted(self, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return super().acted(gate, up, torch.float64)


ROUNDING_MUTANTS = [
    SumIsNotRounded, OneScaleForAllRows, RoundsBeforeTheWeight, ActsOnTheSecondHalf, RoundsTheActivationOnce,
]  # fmt: skip

MUTANTS = [
    NoBias, Wraps, OneScale, Truncates, ZeroMoves, LastColumn, DividesByZero, RowsTogether, RowsUnsaid, WideResults,
    NarrowSums, KeepsBias, ScalesWeights, ChangesRows, IgnoresStrides, RoundsByChance, OneBuffer, PlainBytes,
    TakesAnything, HeadsAreHalf, FirstRowTwice, Overstates, SaysNothing, ServesEverything,
]  # fmt: skip

STORED_MUTANTS = [
    AnyDtype, WholeOnEachRank, LastPartFirst, FirstColumns, Doubles, BiasLost, ClaimsEverything, ClaimsNothing,
    CoversEverything, CoversNothing,
]  # fmt: skip
MUTANTS += [*STORED_MUTANTS, *ROUNDING_MUTANTS]


class StoredConformance(Times3Suite, QuantizationConformance):
    """With what the suite asks for beside a card."""


OTHERS = [mutant for mutant in MUTANTS if mutant not in (*STORED_MUTANTS, *ROUNDING_MUTANTS)]
globals().update(suites_of(QuantizationConformance, "absmax", OTHERS))
globals().update(suites_of(QuantizationConformance, PlainRoundingCard, ROUNDING_MUTANTS))
globals().update(suites_of(StoredConformance, Times3Card, STORED_MUTANTS))


class TestUnbrokenRounding(QuantizationConformance):
    card = PlainRoundingCard
