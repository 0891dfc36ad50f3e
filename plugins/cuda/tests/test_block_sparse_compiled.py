"""The block-sparse kernels compile for GPUs that are not there, within their registers and shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from attention_compiled import BYTES, target
from compiled import Case, Compiled, compile_all
from test_attention_triton_compiled import SHARED

from engine_cuda.attention_block_sparse.kernels import SparseForm, block_sparse_kernel, join_kernel
from engine_cuda.attention_triton.tiles import decode_tiles, prefill_tiles

A_FEW = 128
"""Bytes of spilled registers that do no harm, beside thousands of products."""


def attention(
    where: str, size: int = 128, dtype: str = "bf16", kv: str = "bf16", *, one: bool, shifts: bool = False,
    splits: int = 1, page: int = 16, block: int = 64,
) -> Case:  # fmt: skip
    """Of a model with four query heads to a KV head."""
    width = triton.next_power_of_2(size)
    tiles = (decode_tiles if one else prefill_tiles)(width, BYTES[dtype], BYTES[kv], target(where))
    packed = 1 if shifts else 4
    queries = 1 if one else tiles.rows // packed
    form = SparseForm(
        KV_HEADS=8, GROUP=4, PACKED=packed, HEAD_SIZE=size, BLOCK_D=width, PAGE=page,
        BLOCK_M=max(16, triton.next_power_of_2(queries * packed)),
        BLOCK_N=min(tiles.keys, max(16, triton.next_power_of_2(block))), BLOCK=block, LOCAL=16, STRIDE=8, SINKS=1,
        SHIFTS=shifts, ONE=one, SPLITS=splits, LSE=splits > 1, WIDEN=dtype == "fp32",
    )  # fmt: skip
    strides = {
        **dict.fromkeys(("out_strides", "cache_strides"), ("i32",) * 3), "q_strides": ("i32",) * 2,
        "table_stride": "i32",
    }  # fmt: skip
    known: dict[str | tuple[str, int], object] = {"FORM": form}
    if one:
        known["step", 2] = None
    if splits == 1:
        known |= {"lse": None, ("lse_strides", 0): 0, ("lse_strides", 1): 0, ("lse_strides", 2): 0}
    return Case(
        block_sparse_kernel,
        {
            "out": "*fp32" if splits > 1 else f"*{dtype}", "q": f"*{dtype}", "cache": (f"*{kv}",) * 2,
            "step": ("*i32", "*i64", "constexpr" if one else "*i32"), "scale": "fp32", "first_head": "i32",
            "head_step": "i32", "lse_strides": ("i32" if splits > 1 else "constexpr",) * 3, **strides,
            **({"lse": "*fp32"} if splits > 1 else {}),
        },
        known, where, tiles.warps, tiles.stages, multiples_of_16=tuple(strides),
    )  # fmt: skip


def joining(where: str, size: int = 128) -> Case:
    """32 parts, for the full precision of a model's output."""
    strides = {"out_strides": ("i32",) * 2, "lse_strides": ("i32",) * 2}
    strides |= {"part_strides": ("i32",) * 3, "sum_strides": ("i32",) * 3}
    return Case(
        join_kernel,
        {"out": "*bf16", **dict.fromkeys(("lse", "parts", "sums"), "*fp32"), **strides},
        {"HEAD_SIZE": size, "BLOCK_D": triton.next_power_of_2(size), "SPLITS": 32, "LSE": True},
        where, 1,
    )  # fmt: skip


def compiled(cases: list[Case]) -> list[Compiled]:
    found = compile_all(cases)
    for case, use in zip(cases, found, strict=True):
        assert use.shared <= SHARED[case.target] and use.spilled <= A_FEW, (case.target, case.constexprs, use[:3])
    return found


def test_what_serves_most_models() -> None:
    decode, prompt, _, rocm = compiled(
        [attention("sm_90", one=True, splits=16), attention("sm_90", one=False), joining("sm_90"),
         attention("gfx942", one=True)]
    )  # fmt: skip
    assert "wgmma.mma_async" in prompt.assembly and "mma.sync" in decode.assembly and "v_mfma" in rocm.assembly
    assert "cp.async.cg.shared.global" in decode.assembly, "keys and values are not loaded ahead"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_every_form(where: str, size: int) -> None:
    """By head size, dtype, pattern and page."""
    cases = [attention(where, size, one=one, shifts=shifts) for one in (True, False) for shifts in (True, False)]
    cases += [attention(where, size, one=True, page=7, block=48), attention(where, size, "fp32", "fp32", one=False)]
    if where != "sm_80":
        cases += [attention(where, size, kv="fp8e4nv", one=one) for one in (True, False)]
    compiled([*cases, joining(where, size)])
