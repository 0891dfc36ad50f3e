"""Driver `stored-triton`: codes multiplied as they are stored, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from engine.interfaces.quantization import LayerShape, QuantizationCard, QuantizationNeed
from engine_cuda.quantization_fp8.body import UNIT, Fp8Body, Fp8Layer
from engine_cuda.quantization_fp8.card import Fp8Options, Fp8Quantization
from engine_cuda.quantization_fp8.rows import FP8
from engine_quantization.body import ReadsStored
from engine_quantization.order import in_order, refused
from engine_quantization.readers import Codes
from engine_quantization.triton_kernels import CHUNK, codes_linear, laid_out

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class OnGpu(NamedTuple):
    """A layer.

    Args:
        codes: uint8, see `triton_kernels.laid_out`.
        bits: of a code.
        scales: [O, groups].
        zeros: uint8 [O, groups] or None.
        values: float32, the numbers of codes, or None.
        bias: [O] or None.
        group_size: inputs of a group.
        order: int64, which input of a row comes where; None: as they stand.
    """

    codes: torch.Tensor
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    values: torch.Tensor | None
    bias: torch.Tensor | None
    group_size: int
    order: torch.Tensor | None


class TritonBody(ReadsStored):
    """Weights are taken out of their codes tile by tile, within the product. 8-bit floats with a scale for each output
    go the way of `fp8`, where the GPU multiplies such."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._context = context

    @cached_property
    def _fp8(self) -> Fp8Body | None:
        """What multiplies 8-bit floats as such, where driver `fp8` would; it is tried when the first layer wants it."""
        device, dtype = self._context.device, self._context.dtype
        if device is None or device.type != "cuda":
            return None
        name = str(dtype).removeprefix("torch.")
        need = QuantizationNeed(kind="linear", dtype=name, stored_dtype="bfloat16", device=str(device))
        card = cast("type[QuantizationCard]", Fp8Quantization)
        if card.unsupported(need):
            return None
        return Fp8Body(replace(self._context, options=Fp8Options()))

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> OnGpu | Fp8Layer:
        bias = None if bias is None else bias.clone()
        if codes.bits == 8 and codes.values is not None and codes.scales.shape[1] == 1 and self._fp8 is not None:
            return _of_fp8(codes, bias, self._fp8)
        codes, order = in_order(codes)
        size, inputs = codes.group_size, codes.codes.shape[1]
        if codes.scales.shape[1] == 1:
            size = -(-inputs // (2 * CHUNK)) * 2 * CHUNK
        if size % CHUNK:
            raise refused(layer, f"{size} inputs share a scale, which is no multiple of {CHUNK}")
        values = None if codes.values is None else codes.values.to(codes.codes.device)
        kept = [None if t is None else t.contiguous().clone() for t in (codes.scales, codes.zeros)]
        scales, zeros = kept
        assert scales is not None
        return OnGpu(laid_out(codes.codes, codes.bits), codes.bits, scales, zeros, values, bias, size, order)

    def packed_bytes(self, packed: OnGpu | Fp8Layer) -> int:
        """Codes, scales, zeros and bias, with their padding."""
        return sum(tensor.nbytes for tensor in packed if isinstance(tensor, torch.Tensor))

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype."""
        if isinstance(packed, Fp8Layer):
            assert self._fp8 is not None
            return self._fp8.linear(x, packed)
        if packed.order is not None:
            x = x.index_select(1, packed.order)
        return codes_linear(
            x, packed.codes, packed.bits, packed.scales, packed.zeros, packed.values, packed.bias, packed.group_size
        )


def _of_fp8(codes: Codes, bias: torch.Tensor | None, body: Fp8Body) -> Fp8Layer:
    """As `fp8` has it: filled up to whole units."""
    outputs, inputs = codes.codes.shape
    more, wider = -outputs % UNIT, -inputs % UNIT
    scales = F.pad(codes.scales[:, 0].float(), (0, more)).unsqueeze(0)
    held = F.pad(codes.codes, (0, wider, 0, more)).contiguous().view(FP8)
    bias = None if bias is None else F.pad(bias, (0, more))
    return Fp8Layer(held.clone(), scales.contiguous(), outputs, bias, body)
