"""The linear layer for few rows: beside float64, as it is chosen, and compiled for GPUs that are not there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from compiled import Case, compile_all

from engine.interfaces.ops import OPERATIONS, OpsCard, OpsNeed
from engine.plugin import Registry
from engine.plugin.choosing import choose
from engine.plugin.points import OPS
from engine.plugin.selection import Selection
from engine_cuda.interpreter import interpreted
from engine_cuda.ops_triton_gemv import kernel
from engine_cuda.ops_triton_gemv.body import MOST_ROWS, PROGRAMS, WARPS, TritonGemvBody, blocks
from engine_cuda.ops_triton_gemv.card import TritonGemv
from engine_sdk.conformance import OpsConformance

DEVICE = "cpu" if interpreted() else "cuda"
SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024), (4096, 14336)]
"""Outputs and inputs of layers of 0.6B, and the widest of 8B."""


class TestGemvInterpreted(OpsConformance):
    driver, stand_in = "triton_gemv", "interpreted"
    quick = r"card|known|methods|linear_of_a_view\[float32|linear_keeps_rows_apart\[bfloat16"


@pytest.mark.gpu
class TestGemv(OpsConformance):
    driver, device = "triton_gemv", "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("outputs", "inputs", "numbers"),
    [
        (70, 1000, [1, MOST_ROWS, MOST_ROWS + 1]),
        (9, 2500, [1, 4]),
        pytest.param(70, 1000, range(2, MOST_ROWS), marks=pytest.mark.slow),
        pytest.param(541, 24, [2], marks=pytest.mark.slow),
    ],
)
def test_few_rows(outputs: int, inputs: int, numbers: Sequence[int], dtype: torch.dtype) -> None:
    """Outputs and inputs that fill no program, rows that lie apart, with a bias and without; one row too many too."""
    random, ops = torch.Generator().manual_seed(0), TritonGemvBody(None)  # type: ignore[arg-type]
    weight = torch.randn(outputs, inputs, generator=random).to(dtype).to(DEVICE)
    bias = torch.randn(outputs, generator=random).to(dtype).to(DEVICE)
    for rows in numbers:
        x, added = (
            torch.randn(rows, inputs + 8, generator=random).to(dtype).to(DEVICE)[:, 8:],
            bias if rows % 2 else None,
        )
        found = ops.linear(x, ops.pack_linear(weight, added))
        expected = x.double() @ weight.double().T + (0 if added is None else added.double())
        assert found.dtype == dtype and found.is_contiguous()
        tolerance = 2e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * inputs**0.5)


def test_nobody_gets_it_who_does_not_ask() -> None:
    """Priority below torch's, which has every operation; asked for, it takes the linear layer and nothing else."""
    registry = Registry.discover()
    needs = {name: OpsNeed(operation=name, dtype="bfloat16", device="cpu") for name in OPERATIONS}
    together = [("pack_linear", "linear")]
    chosen = {
        asked: {s.kind for s in choose(registry, OPS, needs, asked, {}, together) if _is_ours(s)}
        for asked in (None, "triton_gemv")
    }
    if interpreted():
        assert chosen == {None: set(), "triton_gemv": {"pack_linear", "linear"}}
    assert TritonGemv.unsupported(replace(needs["linear"], device="cuda")) == []
    assert "int8" in TritonGemv.unsupported(replace(needs["linear"], dtype="int8"))[0]


def _is_ours(selection: Selection[OpsCard]) -> bool:
    return selection.candidate.name == "triton_gemv"


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_there_are_programs_for_all_of_a_gpu(outputs: int, inputs: int) -> None:
    """And none is so wide that a thread would have more than 64 sums."""
    for rows in range(1, MOST_ROWS + 1):
        block, width = blocks(outputs, inputs, rows)
        assert -(-outputs // block) >= PROGRAMS and width <= 8192
        assert block * width * rows <= 64 * 32 * WARPS


def _cases(target: str, rows: tuple[int, ...], shapes: list[tuple[int, int]]) -> list[Case]:
    cases = []
    for outputs, inputs in shapes:
        for count in rows:
            block, width = blocks(outputs, inputs, count)
            cases.append(
                Case(
                    kernel.gemv_kernel,
                    {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "x_stride": "i32", "outputs": "i32"},
                    {"bias": None, "ROWS": count, "INPUTS": inputs, "OUTPUTS": block, "WIDTH": width},
                    target,
                    num_warps=WARPS,
                    multiples_of_16=["x_stride", "outputs"],
                )
            )
    return cases


def _check(cases: list[Case]) -> None:
    for case, use in zip(cases, compile_all(cases), strict=True):
        assert use.spilled == 0, (case.constexprs, use.registers, use.spilled)
        if case.target.startswith("sm"):
            wide = re.findall(r"ld\.global\S*\.v4\.(?:b32|u32|f32)", use.assembly)
            assert len(wide) >= 4, f"{case.constexprs}: the matrix is not read by 16 bytes a thread"


def test_it_compiles_for_hopper() -> None:
    """One row and four; loads of 16 bytes, no register in memory."""
    _check(_cases("sm_90", (1, 4), [(1024, 3072)]))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_it_compiles_for_every_shape(target: str) -> None:
    """As above."""
    _check(_cases(target, (1, 2, 3, 4), SHAPES))
