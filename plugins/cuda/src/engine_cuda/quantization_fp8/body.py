"""Weights and rows of 8-bit floats, through torch's scaled matrix product (cuBLASLt, or CUTLASS before Hopper); a few
rows in their own type, by a kernel that reads the weights as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from triton.errors import TritonError

from engine.interfaces.quantization import LayerShape, StoredTensor, plain_tensors
from engine.types.errors import ConfigError
from engine_cuda.dependents import depends
from engine_cuda.quantization_fp8.few_rows import few_rows
from engine_cuda.quantization_fp8.rows import FP8, quantize_normed, quantize_rows, quantize_weight
from engine_kit.plain_layer import plain_layer

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cuda.quantization_fp8.card import Fp8Options

UNIT = 16
"""Rows and columns of a matrix that tensor cores take are multiples of it; shorter ones are filled up with zeros."""
TRIED_ROWS = (1, 17, 256)
"""A decode, rows that fill no tile, and several tiles: torch and its libraries take other ways for some of them."""
TRIED = (272, 144)
"""Inputs and outputs: of more than one tile, and of no whole number of them."""
NEAR = 2.0**-6
"""Of the largest number of a row's result that is tried, beside float32: bfloat16 loses 2**-9 of it, fast accumulation
some 2**-13 in each sum; the scale of another row or output is several times as far off."""


class Fp8Layer(NamedTuple):
    """A layer: weight[o, i] = scales[o] * codes[o, i]. An `engine_kit.rounded_rows.RoundsRows`.

    Args:
        codes: e4m3 [padded outputs, padded inputs].
        scales: float32 [1, padded outputs]: what the product takes, whether they differ or not.
        outputs: O.
        bias: [padded outputs], or None.
        body: what multiplies with it.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    outputs: int
    bias: torch.Tensor | None
    body: Fp8Body

    def rounds(self, rows: int) -> bool:
        """More than the kernel for few rows takes, where `Fp8Options.fused`."""
        return self.body.fused and rows > self.body.few_rows

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual [T, I] by the matrix, and that sum: a kernel and a product."""
        codes, scales, total = quantize_normed(x, residual, norm, eps, self.codes.shape[1], self.body.dependent)
        return self.body.product(codes, scales, self, x.dtype), total

    def after_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu of the first half of gate_up [T, 2 * I] times the second by the matrix: a kernel and a product."""
        codes, scales = quantize_rows(gate_up, self.codes.shape[1], True, self.body.dependent)
        return self.body.product(codes, scales, self, gate_up.dtype)


class Fp8Body:
    """See `engine.interfaces.quantization.Quantization`.

    Rows are rounded one by one: a scale over all rows of a step would make a row's result depend on the others. How
    many they are decides whether they are rounded at all: see `Fp8Options.few_rows`.

    Attributes:
        few_rows, fused: see `Fp8Options`.
        dependent: what kernels that round rows are launched with.
    """

    def __init__(self, context: WorkerContext) -> None:
        options: Fp8Options = context.options
        self._per_channel = options.weights == "channel"
        self._fast_accum = options.fast_accum
        self.few_rows = options.few_rows
        self.fused = options.fused
        self.dependent = depends(context)
        if context.device is not None:
            self._try(context.device, context.dtype or torch.bfloat16)

    def _try(self, device: torch.device, dtype: torch.dtype) -> None:
        """Small products beside float32: what a GPU or its libraries cannot do, or do wrongly (pytorch issue 133334),
        shows before a long load, not behind it. Where kernels are interpreted it shows what torch 2.11 lacks: its
        product on a processor takes one scale alone."""
        library = f"torch {torch.__version__}"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a processor"
        asked = f"multiply matrices of fp8 on {name}, in {dtype}"
        hint = "it takes a GPU of compute capability 8.9 or later (Ada, Hopper); leave --quantization out"
        inputs, outputs = TRIED
        random = torch.Generator(device).manual_seed(0)
        weight, bias = (
            torch.randn(shape, generator=random, device=device) for shape in ((outputs, inputs), (outputs,))
        )
        bias = bias.to(dtype)
        codes, scales = quantize_weight(weight, outputs, inputs, self._per_channel)
        layer = Fp8Layer(codes, scales.expand(1, outputs).contiguous(), outputs, bias, self)
        # Widened by the host: on one GPU torch 2.11 widened each fourth number of e4m3 to 0.
        held = codes.cpu().float() * layer.scales.T.cpu()
        few = sorted({1, self.few_rows} if self.few_rows else ())
        tried = [(rows, "the kernel of few rows") for rows in few]
        for rows, by in [*tried, *((rows, library) for rows in TRIED_ROWS)]:
            x = torch.randn((rows, inputs), generator=random, device=device).to(FP8)
            sizes = 1.0 + torch.arange(rows, device=device).unsqueeze(1) % 5
            try:
                if by == library:
                    found = self._multiply(x, sizes, layer, dtype)
                else:
                    found = self.linear((x.float() * sizes).to(dtype), layer)
            except (RuntimeError, ValueError, TritonError) as error:
                raise ConfigError(asked, f"{by} says: {str(error).strip().splitlines()[0]}", hint) from error
            expected = x.cpu().float() * sizes.cpu() @ held.T + bias.cpu().float()
            apart, largest = (found.cpu().float() - expected).abs().amax(1), expected.abs().amax(1)
            if not bool((apart <= NEAR * largest).all()):
                wrong = f"{by} computes {rows} x {inputs} x {outputs} wrongly"
                raise ConfigError(
                    asked, f"{wrong}: {float((apart / largest).max()):.2g} of the largest number beside float32", hint
                )

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
        return Fp8Layer(codes, scales.expand(1, outputs).contiguous(), weight.shape[0], bias, self)

    def packed_bytes(self, packed: Fp8Layer) -> int:
        """Codes, scales and bias, with their padding."""
        return sum(t.nbytes for t in (packed.codes, packed.scales, packed.bias) if t is not None)

    def linear(self, x: torch.Tensor, packed: Fp8Layer) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype: for few rows one kernel; for more one that rounds the rows, and a product
        that takes scales and bias."""
        if 0 < len(x) <= self.few_rows and packed.codes.numel():
            return few_rows(x, packed.codes, packed.scales, packed.bias, packed.outputs)
        codes, scales = quantize_rows(x, packed.codes.shape[1], dependent=self.dependent)
        return self.product(codes, scales, packed, x.dtype)

    def product(self, codes: torch.Tensor, scales: torch.Tensor, packed: Fp8Layer, dtype: torch.dtype) -> torch.Tensor:
        """Of rows that are rounded, codes e4m3 [T, padded inputs] and scales float32 [T, 1] -> [T, O]."""
        found = self._multiply(codes, scales, packed, dtype)
        return found if packed.outputs == found.shape[1] else found[:, : packed.outputs].contiguous()

    def _multiply(
        self, codes: torch.Tensor, scales: torch.Tensor, packed: Fp8Layer, dtype: torch.dtype
    ) -> torch.Tensor:
        """codes e4m3 [T, padded inputs], scales float32 [T, 1] -> [T, padded outputs]."""
        found: torch.Tensor = torch._scaled_mm(
            codes, packed.codes.T, scale_a=scales, scale_b=packed.scales, bias=packed.bias, out_dtype=dtype,
            use_fast_accum=self._fast_accum,
        )  # fmt: skip
        return found
