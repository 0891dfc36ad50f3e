"""Weights and rows of 8-bit floats, through torch's scaled matrix product (cuBLASLt, or CUTLASS before Hopper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from engine.interfaces.quantization import LayerShape, StoredTensor, plain_tensors
from engine.types.errors import ConfigError
from engine_cuda.quantization_fp8.rows import FP8, quantize_rows, quantize_weight
from engine_kit.plain_layer import plain_layer

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cuda.quantization_fp8.card import Fp8Options

UNIT = 16
"""Rows and columns of a matrix that tensor cores take are multiples of it; shorter ones are filled up with zeros."""


class Fp8Layer(NamedTuple):
    """A layer: weight[o, i] = scales[o] * codes[o, i].

    Args:
        codes: e4m3 [padded outputs, padded inputs].
        scales: float32 [1, padded outputs]: what the product takes, whether they differ or not.
        outputs: O.
        bias: [padded outputs], or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    outputs: int
    bias: torch.Tensor | None


class Fp8Body:
    """See `engine.interfaces.quantization.Quantization`.

    Rows are always rounded one by one: a scale over all rows of a step would make a row's result depend on the others.
    """

    def __init__(self, context: WorkerContext) -> None:
        options: Fp8Options = context.options
        self._per_channel = options.weights == "channel"
        self._fast_accum = options.fast_accum
        if context.device is not None:
            self._try(context.device, context.dtype or torch.bfloat16)

    def _try(self, device: torch.device, dtype: torch.dtype) -> None:
        """One small product: what a GPU or its libraries cannot do shows before a long load, not behind it. Where
        kernels are interpreted it shows what torch 2.11 lacks: its product on a processor takes one scale alone."""
        ones = torch.ones(UNIT, UNIT, dtype=FP8, device=device)
        scales = torch.ones(UNIT, 1, dtype=torch.float32, device=device)
        try:
            torch._scaled_mm(
                ones, ones.T, scale_a=scales, scale_b=scales.T, bias=torch.zeros(UNIT, dtype=dtype, device=device),
                out_dtype=dtype, use_fast_accum=self._fast_accum,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a processor"
            raise ConfigError(
                f"multiply matrices of fp8 on {name}, in {dtype}",
                f"torch {torch.__version__} says: {str(error).splitlines()[0]}",
                "it takes a GPU of compute capability 8.9 or later (Ada, Hopper); leave --quantization out",
            ) from error

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """A plain layer's."""
        return plain_tensors(layer)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Fp8Layer:
        """The same way for layers of every kind."""
        weight, bias = plain_layer(layer, tensors)
        outputs, inputs = (-(-size // UNIT) * UNIT for size in weight.shape)
        codes, scales = quantize_weight(weight, outputs, inputs, self._per_channel)
        if bias is not None:
            bias = F.pad(bias, (0, outputs - len(bias))) if outputs > len(bias) else bias.clone()
        return Fp8Layer(codes, scales.expand(1, outputs).contiguous(), weight.shape[0], bias)

    def packed_bytes(self, packed: Fp8Layer) -> int:
        """Codes, scales and bias, with their padding."""
        return sum(t.nbytes for t in (packed.codes, packed.scales, packed.bias) if t is not None)

    def linear(self, x: torch.Tensor, packed: Fp8Layer) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype: one kernel that rounds the rows, one product that takes scales and bias."""
        codes, scales = quantize_rows(x, packed.codes.shape[1])
        found: torch.Tensor = torch._scaled_mm(
            codes, packed.codes.T, scale_a=scales, scale_b=packed.scales, bias=packed.bias, out_dtype=x.dtype,
            use_fast_accum=self._fast_accum,
        )  # fmt: skip
        return found if packed.outputs == found.shape[1] else found[:, : packed.outputs].contiguous()
