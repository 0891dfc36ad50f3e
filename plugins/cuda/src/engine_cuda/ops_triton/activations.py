"""Activations, element by element, computed in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.dependents import MayDepend
from engine_cuda.ops_triton.launching import start_dependent

BLOCK = 1024


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up, float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def silu_mul_kernel(x, out, row_stride, inner, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """out[t] = silu(x[t, :inner]) * x[t, inner:]. Grid: (T, blocks of inner)."""
    start_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < inner
    gate = tl.load(x + token * row_stride + offs_n, mask=mask).to(tl.float32)
    up = tl.load(x + token * row_stride + inner + offs_n, mask=mask).to(tl.float32)
    tl.store(out + token * inner + offs_n, silu_times(gate, up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _tanh(x):
    """By the exponential of what is not positive, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def gelu_kernel(x, out, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """x * Phi(x), or its approximation. Grid: blocks of all elements."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    wide = tl.load(x + offs, mask=mask).to(tl.float32)
    if TANH:
        phi = 0.5 * (1.0 + _tanh(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)))
    else:
        phi = 0.5 * (1.0 + tl.erf(wide * 0.7071067811865476))
    tl.store(out + offs, (wide * phi).to(out.dtype.element_ty), mask=mask)


@triton.jit
def soft_cap_kernel(x, out, count, cap, BLOCK: tl.constexpr):
    """cap * tanh(x / cap). Grid: blocks of all elements."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    wide = tl.load(x + offs, mask=mask).to(tl.float32)
    tl.store(out + offs, (_tanh(wide / cap) * cap).to(out.dtype.element_ty), mask=mask)


class Activations(MayDepend):
    """Activations and the cap of logits."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""
        if gate_up.stride(1) != 1:
            gate_up = gate_up.contiguous()
        tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, inner)
        if out.numel():
            silu_mul_kernel[(tokens, triton.cdiv(inner, BLOCK))](
                gate_up, out, gate_up.stride(0), inner, BLOCK, bool(self.dependent), **self.dependent
            )
        return out

    def gelu(self, x: torch.Tensor, tanh: bool) -> torch.Tensor:
        """x * Phi(x); with `tanh` by its approximation."""
        x = x.contiguous()
        out = torch.empty_like(x)
        if count := x.numel():
            gelu_kernel[(triton.cdiv(count, BLOCK),)](x, out, count, tanh, BLOCK)
        return out

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap)."""
        x = x.contiguous()
        out = torch.empty_like(x)
        if count := x.numel():
            soft_cap_kernel[(triton.cdiv(count, BLOCK),)](x, out, count, cap, BLOCK)
        return out
