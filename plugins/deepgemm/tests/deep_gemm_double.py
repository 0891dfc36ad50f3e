"""DeepGEMM with its own signatures and rules, computed in double precision: what the driver runs on in tests.

It follows sgl-deep-gemm 0.2.5 and the checks of its sources (csrc/apis/gemm.hpp, csrc/apis/layout.hpp,
csrc/utils/layout.hpp, deep_gemm/scheduler/gemm.cuh of github.com/sgl-project/DeepGEMM): layouts that it refuses are
refused, and rows that its kernels skip are filled with NaN.
"""

from __future__ import annotations

from typing import Any

import torch

ARCH = 9
"""Major number of the compute capability; tests set it."""
ALIGNED = 16
"""Rows of a block: 128 as the library comes, which can be set."""
calls: list[tuple[str, tuple[int, ...]]] = []
"""(function, sizes of the result) of each call."""


def check(condition: bool, rule: str) -> None:
    assert condition, f"DeepGEMM's rule is broken: {rule}"


def get_mk_alignment_for_contiguous_layout():
    return ALIGNED


def fp8_gemm_nt(
    a,
    b,
    d,
    c=None,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="",
    disable_ue8m0_cast=False,
    alpha=None,
    epilogue=None,
):
    check(c is None and d.dtype == torch.bfloat16, "kernel 1D2D of Hopper writes bfloat16, and adds nothing")
    check(d.shape == (len(a[0]), len(b[0])) and d.stride(1) == 1, "results by rows, of all outputs")
    calls.append(("dense", tuple(d.shape)))
    d.copy_(_rows(a, recipe) @ _weights(b[0], b[1], recipe).T)


def m_grouped_fp8_gemm_nt_contiguous(
    a,
    b,
    d,
    grouped_layout,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="nk",
    disable_ue8m0_cast=False,
    use_psum_layout=False,
    ensure_zero_padding=True,
    expected_m_for_psum_layout=None,
    epilogue=None,
):
    check(grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous(), "int32, dense")
    check(d.dtype == torch.bfloat16 and len(grouped_layout) == len(d), "an expert for each row, bfloat16")
    groups, outputs, inputs = b[0].shape
    check(d.shape == (len(a[0]), outputs) and d.stride(1) == 1, "results by rows, of all outputs")
    check(b[0].stride(0) == outputs * inputs, "experts one after another")
    check(b[1].dim() == 3 and len(b[1]) == groups, "scales of each expert")
    check(b[1].stride(0) == b[1].shape[1] * b[1].shape[2], "those of an expert after another's")
    check(len(d) % ALIGNED == 0, "rows of an expert fill whole blocks")
    calls.append(("grouped", tuple(d.shape)))
    x = _rows(a, recipe)
    d.fill_(float("nan"))
    for start in range(0, len(d), ALIGNED):
        part = slice(start, start + ALIGNED)
        group = int(grouped_layout[start])  # the kernel looks at a block's first row
        check(set(grouped_layout[part].tolist()) <= {group, -1}, "a block is of one expert")
        if group >= 0:
            d[part] = (x[part] @ _weights(b[0][group], b[1][group], recipe).T).to(d.dtype)
            d[part][grouped_layout[part] < 0] = float("nan")


def transform_sf_into_required_layout(
    sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False, psum_layout=None
):
    """Of Blackwell: a byte of exponent for each output and 128 inputs, four a word, words of outputs together."""
    check(ARCH == 10 and tuple(recipe) == (1, 128, 128) and is_sfa is False and num_groups is None, "weights, once")
    check(sf.dtype == torch.float32 and tuple(sf.shape) == (-(-mn // 128), -(-k // 128)), "a scale for each block")
    exponents = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8).repeat_interleave(128, 0)[:mn]
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[1] % 4))
    words = padded.contiguous().view(torch.int32).T
    return torch.empty(words.shape, dtype=torch.int32).copy_(words).T


def _rows(a: Any, recipe: Any) -> torch.Tensor:
    codes, scales = a
    check(codes.dtype == torch.float8_e4m3fn and codes.stride(1) == 1, "rows in e4m3, inputs together")
    check(codes.shape[1] % 16 == 0, "a tensor copy's stride is a multiple of 16 bytes")
    check(
        scales.dtype == torch.float32 and scales.shape == (len(codes), -(-codes.shape[1] // 128)), "128 inputs a scale"
    )
    check(tuple(recipe) == ((1, 128, 128) if ARCH == 9 else (1, 1, 128)), "the recipe of this GPU")
    if ARCH == 9:
        aligned = -(-len(codes) // 4) * 4
        check(
            scales.stride(1) == aligned and (scales.stride(0) == 1 or len(codes) == 1), "scales of a group lie together"
        )
    else:
        check(scales.is_contiguous() or (scales.stride(0), scales.stride(1)) == (1, len(codes)), "dense scales")
        check(not bool((scales.contiguous().view(torch.int32) & 0x7FFFFF).any()), "powers of two")
    return codes.double() * scales.double().repeat_interleave(128, 1)[:, : codes.shape[1]]


def _weights(codes: torch.Tensor, scales: torch.Tensor, recipe: Any) -> torch.Tensor:
    check(codes.dtype == torch.float8_e4m3fn and codes.is_contiguous(), "weights in e4m3, inputs together")
    outputs, inputs = codes.shape
    check(outputs % 8 == 0 and inputs % 16 == 0, "outputs by 8, inputs by 16")
    if ARCH == 9:
        check(scales.dtype == torch.float32 and scales.is_contiguous(), "float32, dense")
        check(tuple(scales.shape) == (-(-outputs // 128), -(-inputs // 128)), "a scale for each block")
        wide = scales.double().repeat_interleave(128, 0)[:outputs]
    else:
        words = -(-inputs // 512)
        check(scales.dtype == torch.int32 and tuple(scales.shape) == (outputs, words), "four exponents a word")
        check(scales.stride(-2) == 1 and scales.stride(-1) == outputs, "words of an output after another's")
        dense = torch.empty(scales.shape, dtype=torch.int32).copy_(scales)
        exponents = dense.view(torch.uint8).int() - 127
        wide = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents)
    return codes.double() * wide.repeat_interleave(128, 1)[:, :inputs]
