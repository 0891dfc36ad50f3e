"""Norms over the last dimension, one pass: a program holds whole rows in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.dependents import MayDepend
from engine_cuda.ops_triton.launching import power_of_2, start_dependent

TILE = 2048
"""Elements of a program at least: short rows share one."""


@triton.jit
def normed_rows(wide, weight, offs_n, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """The RMS norm of rows in float32 [.., BLOCK], zeros behind SIZE -> in DTYPE."""
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    factor = tl.load(weight + offs_n, mask=offs_n < SIZE, other=0.0).to(tl.float32)
    # Rounded before the weight is applied, as the reference does.
    return ((wide * scale[:, None]).to(DTYPE).to(tl.float32) * factor[None]).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, weight, out, rows, inner_rows, x_strides, eps, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. Grid: blocks of ROWS rows.

    Row r lies at (r // inner_rows) * x_strides[0] + (r % inner_rows) * x_strides[1]: heads, cut out of a projection.
    """
    start_dependent(DEPENDENT)
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK)
    mask = (offs_m < rows)[:, None] & (offs_n < SIZE)[None]
    start = offs_m // inner_rows * x_strides[0] + offs_m % inner_rows * x_strides[1]
    wide = tl.load(x + start[:, None] + offs_n[None], mask=mask, other=0.0).to(tl.float32)
    normed = normed_rows(wide, weight, offs_n, eps, SIZE, out.dtype.element_ty)
    tl.store(out + offs_m[:, None] * SIZE + offs_n[None], normed, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    inputs, weight, outputs, rows, strides, eps, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """outputs: (the norm of x + residual, as that is rounded; x + residual); both may be inputs. Grid: as above.

    inputs: (x, residual), of which `strides` has those of rows.
    """
    start_dependent(DEPENDENT)
    x, residual = inputs
    normed, total = outputs
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK)
    mask = (offs_m < rows)[:, None] & (offs_n < SIZE)[None]
    wide = tl.load(x + offs_m[:, None] * strides[0] + offs_n[None], mask=mask, other=0.0).to(tl.float32)
    wide += tl.load(residual + offs_m[:, None] * strides[1] + offs_n[None], mask=mask, other=0.0).to(tl.float32)
    added = wide.to(total.dtype.element_ty)
    offs = offs_m[:, None] * SIZE + offs_n[None]
    tl.store(total + offs, added, mask=mask)
    y = normed_rows(added.to(tl.float32), weight, offs_n, eps, SIZE, normed.dtype.element_ty)
    tl.store(normed + offs, y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def layer_norm_kernel(
    x, weight, bias, out, rows, eps, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[r] = (x[r] - mean) / sqrt(variance + eps) * weight + bias. Grid: blocks of ROWS rows."""
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK)
    mask_n = offs_n < SIZE
    mask = (offs_m < rows)[:, None] & mask_n[None]
    offs = offs_m[:, None] * SIZE + offs_n[None]
    wide = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(wide, axis=1) / SIZE
    centred = tl.where(mask, wide - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / SIZE + eps)
    factor = tl.load(weight + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    shift = tl.load(bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    y = centred * scale[:, None] * factor[None] + shift[None]
    tl.store(out + offs, y.to(out.dtype.element_ty), mask=mask)


class Norms(MayDepend):
    """RMS norm (Zhang, Sennrich 2019) and layer norm (Ba, Kiros, Hinton 2016)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] -> the same, dense."""
        size = x.shape[-1]
        if x.dim() > 3 or x.stride(-1) != 1:
            x = x.contiguous()
        if x.dim() != 3:
            x_rows = x.view(-1, 1, size) if x.dim() != 2 else x.unsqueeze(1)
        else:
            x_rows = x
        out = x.new_empty(x.shape)
        if out.numel():
            rows = out.numel() // size
            grid, block, each, warps = shape_of(rows, size)
            rms_norm_kernel[grid](
                x_rows, weight, out, rows, x_rows.shape[1], x_rows.stride()[:2], eps, size, each, block,
                bool(self.dependent), num_warps=warps, **self.dependent,
            )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); x, residual [..., H]. Written into both where they are dense."""
        size = x.shape[-1]
        if not (x.is_contiguous() and residual.is_contiguous()):
            x, residual = x.contiguous(), residual.contiguous()
        if x.numel():
            rows = x.numel() // size
            grid, block, each, warps = shape_of(rows, size)
            add_rms_norm_kernel[grid](
                (x, residual), weight, (x, residual), rows, (size, size), eps, size, each, block,
                bool(self.dependent), num_warps=warps, **self.dependent,
            )  # fmt: skip
        return x, residual

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] -> the same, dense."""
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        if x.numel():
            rows = x.numel() // size
            grid, block, each, warps = shape_of(rows, size)
            layer_norm_kernel[grid](x, weight, bias, out, rows, eps, size, each, block, num_warps=warps)
        return out


def shape_of(rows: int, size: int) -> tuple[tuple[int], int, int, int]:
    """(grid, BLOCK, ROWS, warps): few rows are spread over many programs, of many rows several share one."""
    block = power_of_2(size)
    each = max(1, min(TILE // block, power_of_2(rows) // 256))
    return (triton.cdiv(rows, each),), block, each, min(16, max(1, block * each // 512))
