"""The linear layer for few rows: beside float64, as it is chosen, and compiled for GPUs that are not there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from compiled import Case, compile_all

from engine import LLM, SamplingParams
from engine.interfaces.ops import OPERATIONS, OpsCard, OpsNeed
from engine.plugin import Registry
from engine.plugin.choosing import choose
from engine.plugin.points import OPS
from engine.plugin.selection import Selection
from engine_cuda.interpreter import interpreted
from engine_cuda.ops_triton_gemv import body, kernel
from engine_cuda.ops_triton_gemv.body import PackedWeight, TritonGemvBody, few_rows
from engine_cuda.ops_triton_gemv.card import TritonGemv
from engine_cuda.ops_triton_gemv.cuts import MOST_NORMED, MOST_ROWS, VECTOR, MatrixCut, cut_of
from engine_sdk.conformance import OpsAround, OpsConformance

DEVICE = "cpu" if interpreted() else "cuda"
SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024), (4096, 14336)]
"""Outputs and inputs of layers of 0.6B, and the widest of 8B."""
NORMED = [(6144, 1024), (28672, 4096), (57344, MOST_NORMED)]
"""Of layers whose inputs are normed."""


class TestGemvInterpreted(OpsAround, OpsConformance):
    driver, stand_in = "triton_gemv", "interpreted"
    quick = (
        r"card|known|methods|linear_of_a_view\[float32|linear_keeps_rows_apart\[bfloat16|around_a_matrix\[True-float32"
    )


@pytest.mark.gpu
class TestGemv(OpsAround, OpsConformance):
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
    random, ops = torch.Generator().manual_seed(0), TritonGemvBody(None)
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


@pytest.mark.parametrize("cut", [MatrixCut(4, 1), MatrixCut(2, 2, programs=3)])
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS])
def test_what_is_around_the_product(rows: int, cut: MatrixCut) -> None:
    """The norm before, the activation or the sum behind; rows that lie apart; memory that was full of NaN. Outputs and
    inputs fill no block; programs take one block each, or several."""
    random, eps = torch.Generator().manual_seed(0), 1e-5

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(DEVICE)

    x, residual, norm, bias = draw(rows, 308)[:, 8:], draw(rows, 25)[:, 3:], draw(300), draw(22)
    packed = TritonGemvBody(None).pack_linear(draw(22, 300) * 0.1, bias)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.double()
    product, of_normed = (each @ packed.weight.double().T + bias.double() for each in (wide, normed))
    gate, up = of_normed.chunk(2, -1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that is taken with NaN
    try:
        found = {
            "norm": few_rows(x, packed, norm=norm, eps=eps, cut=cut),
            "gated": few_rows(x, packed, norm=norm, eps=eps, gated=True, cut=cut),
            "residual": few_rows(x, packed, residual=residual, cut=cut),
        }
    finally:
        torch.use_deterministic_algorithms(False)
    expected = {"norm": of_normed, "gated": gate * torch.sigmoid(gate) * up, "residual": product + residual.double()}
    for name, wanted in expected.items():
        torch.testing.assert_close(
            found[name].double(), wanted, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


SETTINGS = {
    "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4,
    "attention": "torch", "platform": "host",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="the GPU's own comparison is with transformers")
def test_the_bundled_model_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt, by torch's products, and of two requests that decode, by four launches a layer and the head's."""
    launched: list[tuple[int, list[str]]] = []

    def noted(x: torch.Tensor, packed: PackedWeight, **around: Any) -> torch.Tensor:
        launched.append((len(x), sorted(around)))
        return few_rows(x, packed, **around, cut=MatrixCut(64, 8))  # the interpreter's time goes by programs

    monkeypatch.setattr(body, "few_rows", noted)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3, 5, 7, 9, 11][: 5 - i] * 2} for i in range(2)]
    found = {}
    for ops in ("torch", "triton_gemv,torch"):
        with LLM(ops=ops, **SETTINGS) as llm:
            launched.clear()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[ops] = [list(output.outputs[0].token_ids) for output in outputs]
    assert found["triton_gemv,torch"] == found["torch"]
    layer = [["eps", "gated", "norm"], ["residual"]] * 2
    assert launched[-25:] == [(2, around) for around in layer * 6 + [[]]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS])
def test_dependents_wait(rows: int) -> None:
    """A chain of launches that begin before the one before has ended, as a graph: each reads what that one wrote."""
    size, random = 1024, torch.Generator("cuda").manual_seed(0)
    weights = [torch.randn(size, size, generator=random, device="cuda") * size**-0.5 for _ in range(24)]
    packed = [TritonGemvBody(None).pack_linear(weight.bfloat16(), None) for weight in weights]
    norm = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, size, generator=random, device="cuda").bfloat16()

    def chain(dependent: bool) -> torch.Tensor:
        y = x
        for each in packed:
            y = few_rows(y, each, residual=y, dependent=dependent)
            y = few_rows(y, each, norm=norm, eps=1e-6, dependent=dependent)
        return y

    wanted = chain(dependent=False)
    chain(dependent=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(dependent=True)
    for _ in range(20):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_all_of_a_gpu_reads(outputs: int, inputs: int) -> None:
    """There are two programs at least for each of an H100's 132 multiprocessors, and at most 128 bytes of the matrix
    for each thread at once, 32 registers: twice that with what comes next."""
    for rows in range(1, MOST_ROWS + 1):
        cut = cut_of(outputs, inputs, rows)
        assert cut.grid(outputs)[0] >= 256
        pieces = -(-inputs // cut.width(inputs))
        assert cut.outputs * pieces * VECTOR * 2 <= 256


def _cases(target: str, rows: tuple[int, ...], shapes: list[tuple[int, int]]) -> list[Case]:
    """Of each matrix the plain product, the norm before it with the activation behind, and the sum behind it; those
    launches of Hopper are dependent ones."""
    pointer = "*bf16"
    cases = []
    for outputs, inputs in shapes:
        for count in rows:
            cut = cut_of(outputs, inputs, count)
            for norm, residual, gated in ((None, None, False), (pointer, None, True), (None, pointer, False)):
                if norm and inputs > MOST_NORMED:
                    continue
                given = {"norm": norm, "residual": residual, "bias": None}
                cases.append(
                    Case(
                        kernel.few_rows_kernel,
                        {"x": pointer, "weight": pointer, "out": pointer, "x_stride": "i32", "residual_stride": "i32",
                         "outputs": "i32", "num_rows": "i32", "eps": "fp32",
                         **{name: kind for name, kind in given.items() if kind}},
                        {"ROWS": count, "INPUTS": inputs, "OUTPUTS": cut.outputs, "WIDTH": cut.width(inputs),
                         "GATED": gated, "ONCE": cut.grid(outputs)[1], "DEPENDENT": target == "sm_90",
                         **{name: None for name, kind in given.items() if not kind}},
                        target,
                        num_warps=cut.warps,
                        multiples_of_16=["x_stride", "residual_stride", "outputs"],
                    )
                )  # fmt: skip
    return cases


def _check(cases: list[Case]) -> None:
    for case, use in zip(cases, compile_all(cases), strict=True):
        assert use.spilled == 0, (case.constexprs, use.registers, use.spilled)
        if case.target.startswith("sm"):
            before, waits, _ = use.assembly.partition("griddepcontrol.wait")
            wide = re.findall(r"ld\.global\S*\.v4\.(?:b32|u32|f32)", before)
            assert len(wide) >= 4, f"{case.constexprs}: no reads of 16 bytes a thread before it waits"
            assert bool(waits) == case.constexprs["DEPENDENT"]


def test_it_compiles_for_hopper() -> None:
    """One row and four; loads of 16 bytes, no register in memory."""
    _check(_cases("sm_90", (1, 4), [(1024, 1024)]))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_it_compiles_for_every_shape(target: str) -> None:
    """As above."""
    _check(_cases(target, (1, 2, 4), SHAPES + NORMED))
