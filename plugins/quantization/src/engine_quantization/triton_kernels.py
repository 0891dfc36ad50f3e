"""Products with stored codes, in Triton: a tile of outputs is taken out of its codes and multiplied at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.interpreter import interpreted

INTERPRETED = interpreted()
CHUNK = 32
"""Inputs of 4 bits that lie together: byte j of 16 has input j in its lower half, and input 16 + j in its upper one."""
FEW_ROWS = 16


@triton.jit
def _number(codes, values, zero, TABLE: tl.constexpr):
    """float32 of uint8 [outputs, inputs], less what stands for zero, or by the table."""
    if TABLE:
        return tl.load(values + codes.to(tl.int32))
    return codes.to(tl.float32) - zero[:, None]


@triton.jit
def _codes_kernel(
    x, codes, scales, zeros, values, bias, out, rows, outputs, inputs, x_stride, row_bytes, groups, group_size,
    BITS: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [rows, outputs] = x [rows, inputs] @ weight.T + bias; BK inputs at a time, which have one scale."""
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    here = n < outputs
    in_rows = (m < rows)[:, None]
    x += m[:, None].to(tl.int64) * x_stride
    codes += n[:, None].to(tl.int64) * row_bytes
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, inputs, BK):
        at = n * groups + start // group_size
        scale = tl.load(scales + at, mask=here, other=0.0).to(tl.float32)
        zero = scale
        if not TABLE:
            zero = tl.load(zeros + at, mask=here, other=0).to(tl.float32)
        if BITS == 4:
            b = tl.arange(0, BK // 2)
            pair = tl.load(codes + start // 2 + b[None, :], mask=here[:, None], other=0)
            k = start + b // 16 * 32 + b % 16
            lower = _number(pair & 15, values, zero, TABLE)
            upper = _number(pair >> 4, values, zero, TABLE)
            first = tl.load(x + k[None, :], mask=in_rows & (k < inputs)[None, :], other=0.0)
            second = tl.load(x + 16 + k[None, :], mask=in_rows & (k + 16 < inputs)[None, :], other=0.0)
            if WIDE:
                part = tl.dot(first.to(tl.float32), tl.trans(lower), input_precision="ieee")
                part += tl.dot(second.to(tl.float32), tl.trans(upper), input_precision="ieee")
            else:
                part = tl.dot(first, tl.trans(lower.to(first.dtype)))
                part = tl.dot(second, tl.trans(upper.to(first.dtype)), part)
        else:
            k = start + tl.arange(0, BK)
            one = tl.load(codes + k[None, :], mask=here[:, None], other=0)
            weight = _number(one, values, zero, TABLE)
            first = tl.load(x + k[None, :], mask=in_rows & (k < inputs)[None, :], other=0.0)
            if WIDE:
                part = tl.dot(first.to(tl.float32), tl.trans(weight), input_precision="ieee")
            else:
                part = tl.dot(first, tl.trans(weight.to(first.dtype)))
        acc += part * scale[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None].to(tl.int64) * outputs + n[None, :], acc, mask=in_rows & here[None, :])


def laid_out(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [O, I] -> as the kernel reads them, filled up to whole chunks of 64 inputs."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (2 * CHUNK)))
    if bits == 8:
        return padded.contiguous()
    halves = padded.unflatten(1, (-1, 2, CHUNK // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()


def codes_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    values: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """x [T, I] by codes of `laid_out`, scales and zeros [O, groups], in groups of a multiple of 32 -> [T, O]."""
    rows, inputs = x.shape
    outputs, groups = scales.shape
    if x.stride(1) != 1 and inputs > 1:
        x = x.contiguous()
    wide = INTERPRETED or x.dtype == torch.float32
    out = torch.empty(rows, outputs, dtype=torch.float32 if INTERPRETED else x.dtype, device=x.device)
    if rows:
        block_k = 64 if group_size % 64 == 0 else 32
        block_m = FEW_ROWS if rows <= FEW_ROWS else 32 if rows <= 32 else 64
        block_n = 32 if rows <= FEW_ROWS else 64
        if INTERPRETED:  # which takes as long for a small tile as for a large one
            block_n = 256
        _codes_kernel[(triton.cdiv(outputs, block_n), triton.cdiv(rows, block_m))](
            x, codes, scales, scales if zeros is None else zeros, scales if values is None else values,
            scales if bias is None else bias, out, rows, outputs, inputs, x.stride(0), codes.shape[1], groups,
            group_size, bits, values is not None, bias is not None, wide, block_m, block_n, block_k,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out.to(x.dtype)
