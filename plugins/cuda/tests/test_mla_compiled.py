"""The kernels of latent attention compiled for GPUs that are not there, as DeepSeek's sizes launch them: none spills
more than a few registers, and each fits into its target's shared memory."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compiled import Case, Compiled, compile_all

from engine_cuda.attention_mla.kernels import join_kernel, latent_attention_kernel, write_kernel
from engine_cuda.attention_mla.tiles import target_of, tiles_of

SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Of a program, at most. What is not for sm_90 has to fit into 99 KB too: sm_86, sm_89 and sm_120 get the same."""
SMALL = 99 << 10
A_FEW = 64
"""Bytes of spilled registers that do no harm, beside thousands of products a tile: 40 of Triton 3.6 for the largest."""
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": None}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1}
SIZES = {"C": 512, "BLOCK_C": 512, "LEAST": 128}
ROTATED = {"P": 64, "BLOCK_P": 64, "PAGE": 16}
ROWS = dict.fromkeys(("first_row", "num_rows", "heads", "num_splits"), "i32")
LSE_STRIDES = {"lse_strides": ("i32", "constexpr")}  # of heads it is 1
ONE = {("lse_strides", 1): 1}


def attention(target: str, pairs: int, ragged: bool, divided: bool, dtype: str = "bf16", kv: str = "") -> Case:
    """One launch for rows of so many pairs of token and head."""
    kv = kv or dtype
    tiles = tiles_of(pairs, BYTES[dtype], BYTES[kv], target_of(CAPABILITIES[target]))
    strides = {"q_strides": ("i32",) * 4, "cache_strides": ("i32",) * 2, "out_strides": ("i32",) * 2}
    signature = {
        "queries": (f"*{dtype}",) * 2, "cache": f"*{kv}", "step": ("*i32", "*i32", "*i64"), "out": f"*{dtype}",
        "lse": "*fp32", "partial": ("*fp32",) * 2, "scale_log2": "fp32", "table_stride": "i32", **strides, **ROWS,
        **LSE_STRIDES,
    }  # fmt: skip
    constexprs = {
        **SIZES, **ROTATED, "BLOCK_M": tiles.queries, "BLOCK_N": tiles.vectors, "RAGGED": ragged, "SPLIT": divided,
        "LSE": False, "WIDEN": dtype == "fp32",
    }  # fmt: skip
    aligned = [*strides, "heads"]
    return Case(latent_attention_kernel, signature, constexprs | ONE, target, tiles.warps, tiles.stages, aligned)


def joining(target: str) -> Case:
    """The parts of divided rows, put together."""
    signature = {
        "step": ("*i32", "*i64"), "out": "*bf16", "lse": "*fp32", "partial": ("*fp32",) * 2,
        "out_strides": ("i32",) * 2, **ROWS, **LSE_STRIDES,
    }  # fmt: skip
    constexprs = {
        **SIZES, "BLOCK_M": 16, "BLOCK_N": 32, "RAGGED": True, "LSE": True, "SPLITS": 64, "BLOCK_COLUMNS": 128,
    }  # fmt: skip
    return Case(join_kernel, signature, constexprs | ONE, target, 1, 3, ["out_strides", "heads"])


def writing(target: str, kv: str) -> Case:
    """A step's vectors."""
    signature = {
        "vectors": ("*bf16",) * 2, "cache": f"*{kv}", "slot_mapping": "*i64", "num_tokens": "i32",
        "strides": ("i32",) * 2, "cache_strides": ("i32",) * 2,
    }  # fmt: skip
    constexprs = {"C": 512, "BLOCK_C": 512, **ROTATED, "BLOCK_T": 4}
    return Case(write_kernel, signature, constexprs, target, 4, 3, ["strides", "cache_strides"])


def check(cases: list[Case]) -> list[Compiled]:
    """All fit, in registers too."""
    found = compile_all(cases)
    for case, use in zip(cases, found, strict=True):
        what = f"{case.kernel.fn.__name__} for {case.target}, {dict(case.constexprs)}, {case.signature}: {use[:3]}"
        assert use.spilled <= A_FEW, what
        limit = SHARED[case.target] if case.target in ("sm_90", "gfx942") else SMALL
        assert use.shared <= limit, what
    return found


def test_decodes_and_prompts_of_an_h100() -> None:
    """16 heads of a rank, divided; 128 heads and prompts on warp groups' products, with copies that run ahead."""
    few, many, _, _ = check(
        [attention("sm_90", 16, False, True), attention("sm_90", 4096, True, False), joining("sm_90"),
         writing("sm_90", "bf16")]
    )  # fmt: skip
    assert "wgmma" in many.assembly and "mma.sync" in few.assembly
    for use in (few, many):
        assert "cp.async.cg.shared.global" in use.assembly
    assert 2 * few.shared <= SHARED["sm_90"] and few.registers * 128 * 2 <= 65536, "two programs have no room"


@pytest.mark.slow
@pytest.mark.parametrize("target", CAPABILITIES)
def test_every_form(target: str) -> None:
    """By heads, rows, dtype and division."""
    forms = product((16, 32, 64, 4096), (False, True), (False, True))
    cases = [attention(target, pairs, ragged, divided) for pairs, ragged, divided in forms]
    cases += [attention(target, 64, True, False, "fp16"), joining(target), writing(target, "bf16")]
    check([*cases, attention(target, 64, True, False, "fp32") if target != "gfx942" else joining(target)])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_fp8(target: str) -> None:
    """What lies in 8 bits is widened in registers."""
    check(
        [attention(target, pairs, True, True, "bf16", "fp8e4nv") for pairs in (16, 64)] + [writing(target, "fp8e4nv")]
    )
