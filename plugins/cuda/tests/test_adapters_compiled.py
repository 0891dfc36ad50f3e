"""The kernels of adapters compiled for GPUs that are not there, at the sizes of models: none spills."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compiled import Case, Compiled, compile_all

from engine_cuda.ops_triton import adapters
from engine_cuda.ops_triton.adapter_kernels import expand_kernel, shrink_kernel

MOST = {"sm_80": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
"""Shared memory of a program."""


def cases(inputs: int, parts: int, rank: int, dtype: str) -> dict[str, Case]:
    """Both kernels of a layer."""
    types = {"inner": dtype, "tokens": "*i32", "starts": "*i32"}
    sizes = {"PARTS": parts, "RANK": rank, "ROWS": adapters.ROWS}
    width = adapters.width_of(rank, 4 if dtype == "*fp32" else 2)
    name = f"{inputs} inputs, {parts} parts, rank {rank}, {dtype}"
    return {
        f"shrink, {name}": Case(
            shrink_kernel, {**types, "x": dtype, "a": dtype, "x_stride": "i32"},
            {**sizes, "INPUTS": inputs, "WIDTH": width}, multiples_of_16=["x_stride"],
        ),
        f"expand, {name}": Case(
            expand_kernel,
            {**types, "b": dtype, "y": dtype, "y_stride": "i32", "part": "i32", "column": "i32", "size": "i32",
             "outputs": "i32"},
            {**sizes, "COLUMNS": width, "STEP": min(rank, adapters.STEP)},
            multiples_of_16=["y_stride", "column", "size", "outputs"],
        ),
    }  # fmt: skip


def check(several: dict[str, Case], target: str) -> dict[str, Compiled]:
    """Compile them; each spills nothing, and finds room."""
    depend = {"DEPENDENT": target == "sm_90"}
    made = [replace(case, target=target, constexprs={**case.constexprs, **depend}) for case in several.values()]
    found = dict(zip(several, compile_all(made), strict=True))
    for name, use in found.items():
        assert use.spilled == 0 and use.shared <= MOST[target], (name, use.registers, use.spilled, use.shared)
    return found


def test_they_compile_for_tensor_cores() -> None:
    found = check(cases(4096, 3, 16, "*bf16"), "sm_90")
    assert all("mma" in use.assembly for use in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("target", MOST)
def test_every_kernel(target: str) -> None:
    several = {}
    for inputs, parts in ((1024, 3), (4096, 1), (12288, 2)):
        for rank in (16, 64, 256):
            for dtype in ("*bf16", "*fp16", "*fp32"):
                several |= cases(inputs, parts, rank, dtype)
    check(several, target)
