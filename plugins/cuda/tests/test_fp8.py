"""Quantization `fp8`: the kernel's numbers, and what its layers do beyond the suite."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import compiled
import triton
import triton.language as tl
from scaled import needs_scales_of_rows, scales_of_rows

from engine.interfaces.quantization import QuantizationNeed
from engine.types.errors import ConfigError
from engine_cuda.dependents import DEPENDENT
from engine_cuda.interpreter_shim import to_e4m3
from engine_cuda.ops_triton.activations import Activations
from engine_cuda.ops_triton.body import TritonOpsBody
from engine_cuda.ops_triton.norms import Norms
from engine_cuda.quantization_fp8 import body as fp8_body
from engine_cuda.quantization_fp8 import few_rows as few
from engine_cuda.quantization_fp8 import rows as kernels
from engine_cuda.quantization_fp8.body import TRIED_ROWS, Fp8Body
from engine_cuda.quantization_fp8.card import MOST_ROWS, Fp8Options, Fp8Quantization
from engine_cuda.quantization_fp8.rows import FP8, LARGEST, quantize_normed, quantize_rows, quantize_weight
from engine_sdk.conformance.quantization import check_rounded_rows, whole_layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAUNCH = {
    "x": "*bf16", "codes": "*u8", "scales": "*fp32", "rows": "i32", "row_stride": "i32", "columns": "i32",
    "padded": "i32",
}  # fmt: skip
NORMED = {
    "x": "*bf16", "residual": "*bf16", "weight": "*bf16", "codes": "*u8", "scales": "*fp32", "rows": "i32",
    "eps": "fp32",
}  # fmt: skip
CONSTANTS = {"DEPENDENT": True, "LARGEST": 448.0, "LEAST_SCALE": 2.0**-120}


def body(**options: Any) -> Fp8Body:
    return Fp8Body(SimpleNamespace(options=Fp8Options(**options), device=None))  # type: ignore[arg-type]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@triton.jit
def _cast_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, to_e4m3(tl.load(x + at)))


def test_every_number_is_rounded_as_torch_rounds_it() -> None:
    """Each number of e4m3, the middle of each two and what lies beside it, with both signs; beyond them, and NaN."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (0.0, 1e9)]
    x = torch.cat([numbers, middles, *beside, torch.tensor([449.0, 1e30, torch.inf, 1e-30])])
    x = torch.nn.functional.pad(torch.cat([x, -x, torch.tensor([torch.nan])]), (0, 0)).to(DEVICE)
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    y = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _cast_kernel[(len(x) // 1024,)](x, y, 1024)
    expected = x.clamp(-LARGEST, LARGEST).to(FP8)
    assert torch.equal(y.view(FP8).float().nan_to_num(1e3), expected.float().nan_to_num(1e3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_and_weights_are_rounded_alike(dtype: torch.dtype) -> None:
    """The kernel gives the bits of plain torch, over widths that fill no block and those that are read twice."""
    for count, columns in ((1, 1), (70, 31), (5, 4096), (3, 20_011)):
        x = random(count, columns + 5, dtype=dtype)[:, 3 : columns + 3]
        x[0] *= 100
        x[-1, : columns // 2] = 0
        padded = -(-columns // 16) * 16
        codes, scales = quantize_rows(x, padded)
        expected, largest = quantize_weight(x, count, padded, per_channel=True)
        assert torch.equal(scales[:, 0], largest[0])
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
        assert not codes[:, columns:].view(torch.uint8).any()


def in_two(
    x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, padded: int
) -> tuple[torch.Tensor, ...]:
    """What `quantize_normed` gives, by the operations one after the other."""
    if residual is None:
        return (*quantize_rows(Norms().rms_norm(x, norm, eps), padded), x)
    normed, total = Norms().add_rms_norm(x, residual, norm, eps)
    return (*quantize_rows(normed, padded), total)


def same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """To the last bit."""
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_are_rounded_as_they_are_made(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The bits of two launches: of a norm, with what is added before it and without, and of an activation whose rows
    stay in registers, or are read twice. Widths fill no block, one row is zeros; memory that is taken is full."""
    eps = 1e-5
    monkeypatch.setattr(torch, "empty", lambda *shape, **more: torch.full(shape, 7, **more))
    monkeypatch.setattr(kernels, "WIDEST", 64)
    for count, columns in ((1, 5), (3, 100), (9, 64)):
        padded = -(-columns // 16) * 16
        norm, x, added = (random(n, columns, dtype=dtype, seed=seed) for seed, n in enumerate((1, count, count)))
        x[-1] = added[-1] = 0
        x[0] *= 100
        gate_up = torch.cat([x, added, x], 1)[:, columns:]  # rows lie apart
        found = quantize_normed(x, None, norm[0], eps, padded, {})
        assert found[2] is x and same(found, in_two(x, None, norm[0], eps, padded))
        total = added.clone()
        found = quantize_normed(x, total, norm[0], eps, padded, {})
        assert found[2] is total and same(found, in_two(x.clone(), added.clone(), norm[0], eps, padded))
        acted = Activations().silu_mul(gate_up)
        assert same(quantize_rows(gate_up, padded, gated=True), quantize_rows(acted, padded))


@needs_scales_of_rows
def test_products_of_what_is_rounded_as_it_is_made() -> None:
    """The bits of two launches and a product, as the suite has them for the options that it is run with: of one scale
    for a layer, and of rows that the kernel for few would take."""

    def numbers(*shape: int, dtype: str, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        return random(*shape, dtype=getattr(torch, dtype), seed=seed) * scale

    made = body(weights="tensor", few_rows=0)
    layer = made.pack(*whole_layer("linear", random(37, 40, dtype=torch.float32), random(37, seed=1)))
    assert check_rounded_rows(made, TritonOpsBody(None), layer, 40, numbers, "bfloat16")  # type: ignore[arg-type]


def test_who_rounds_rows_as_they_are_made() -> None:
    """--quantization.fused, and the kernel for few rows takes them as they are."""
    weight = random(16, 32, dtype=torch.float32)
    for options, first in (({}, MOST_ROWS + 1), ({"few_rows": 0}, 1), ({"fused": False}, None)):
        layer = body(**options).pack(*whole_layer("linear", weight))
        taken = [rows for rows in range(9) if layer.rounds(rows)]
        assert taken == ([] if first is None else list(range(first, 9)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("rows", [5, 256])
def test_rows_are_rounded_as_they_are_made_on_a_gpu(rows: int) -> None:
    """Of the widths of an 8B model, as they are launched and as dependents, in a graph. A compiler may add up a norm's
    squares in another order: then a few codes are their neighbours."""
    hidden, inner, eps = 4096, 14336, 1e-6
    x, residual, gate_up = random(rows, hidden), random(rows, hidden, seed=1), random(rows, 2 * inner, seed=2)
    norm = random(hidden, seed=3)
    codes, scales, total = in_two(x.clone(), residual.clone(), norm, eps, hidden)
    expected = quantize_rows(Activations().silu_mul(gate_up), inner)
    for dependent in ({}, DEPENDENT):
        given = residual.clone()
        quantize_normed(x, given, norm, eps, hidden, dependent)
        quantize_rows(gate_up, inner, True, dependent)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = quantize_normed(x, given, norm, eps, hidden, dependent)
            acted = quantize_rows(gate_up, inner, True, dependent)
        given.copy_(residual)
        graph.replay()
        assert torch.equal(found[2], total) and same(acted, expected)
        apart = found[0].view(torch.uint8).int() - codes.view(torch.uint8).int()
        assert apart.abs().max() <= 1 and apart.count_nonzero() <= 1e-3 * apart.numel()
        torch.testing.assert_close(found[1], scales, rtol=2.0**-7, atol=0.0)


def test_weights_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(100, 48)
    whole = [quantize_weight(weight, 112, 48, each) for each in (True, False)]
    monkeypatch.setattr(kernels, "CHUNK", 7 * 48)
    for each, (codes, scales) in zip((True, False), whole, strict=True):
        again, other = quantize_weight(weight, 112, 48, each)
        assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8)) and torch.equal(scales, other)


@needs_scales_of_rows
def test_one_scale_for_a_layer() -> None:
    """--quantization.weights tensor: every output by the largest weight of all; rows still one by one."""
    weight, bias, x = random(37, 96, dtype=torch.float32), random(37, seed=1), random(5, 96, seed=2)
    weight[5] *= 30
    x[1] *= 100
    layer = body(weights="tensor").pack(*whole_layer("linear", weight, bias))
    assert layer.codes.shape == (48, 96) and layer.scales.unique().numel() == 1
    scale = weight.abs().max() / LARGEST
    held = (weight / scale).to(FP8).double() * scale.double()
    rows = (x.float() / (x.float().abs().amax(1, keepdim=True) / LARGEST)).to(FP8).double()
    rows *= x.double().abs().amax(1, keepdim=True) / LARGEST
    expected = rows @ held.T + bias.double()
    bound = 2.0**-7 * (rows.abs() @ held.abs().T + bias.double().abs())
    for fast in (False, True):
        found = body(weights="tensor", fast_accum=fast).linear(x, layer)
        assert found.dtype == x.dtype and (found.double() - expected).abs().le(bound).all()


@pytest.mark.skipif(scales_of_rows(), reason="this torch multiplies with a scale for each row")
def test_a_torch_that_cannot_multiply_is_refused_at_the_start() -> None:
    context = SimpleNamespace(options=Fp8Options(), device=torch.device("cpu"), dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"multiply matrices of fp8 on a processor, in torch.bfloat16.*per-tensor"):
        Fp8Body(context)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1, MOST_ROWS])
def test_few_rows_that_are_wrong_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """By their kernel, which the products of more rows do not go through: inputs meet their neighbours' weights."""
    kernel = few.few_rows

    def multiply(x: torch.Tensor, *layer: Any) -> torch.Tensor:
        return kernel(x.roll(1, 1) if len(x) == wrong else x, *layer)

    monkeypatch.setattr(fp8_body, "few_rows", multiply)
    context = SimpleNamespace(options=Fp8Options(), device=torch.device(DEVICE), dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=rf"the kernel of few rows computes {wrong} x 272 x 144 wrongly"):
        Fp8Body(context)  # type: ignore[arg-type]


@needs_scales_of_rows
@pytest.mark.parametrize("wrong", TRIED_ROWS)
def test_a_product_that_is_wrong_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """Of some sizes alone, as libraries have been: a bias left out, a row's scale given to the next."""
    product, calls = torch._scaled_mm, []

    def multiply(x: torch.Tensor, y: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append(len(x))
        if len(x) == wrong and wrong > 1:
            more["scale_a"] = more["scale_a"].roll(1, 0)
        return product(x, y, **{**more, "bias": None if len(x) == wrong == 1 else more["bias"]})

    for dtype in (torch.bfloat16, torch.float16):
        for weights in ("channel", "tensor"):
            options = Fp8Options(weights=weights)  # type: ignore[arg-type]
            context = SimpleNamespace(options=options, device=torch.device(DEVICE), dtype=dtype)
            Fp8Body(context)  # type: ignore[arg-type]
            monkeypatch.setattr(torch, "_scaled_mm", multiply)
            with pytest.raises(ConfigError, match=rf"computes {wrong} x 272 x 144 wrongly: .* of the largest number"):
                Fp8Body(context)  # type: ignore[arg-type]
            monkeypatch.setattr(torch, "_scaled_mm", product)
    assert set(calls) == set(TRIED_ROWS[: TRIED_ROWS.index(wrong) + 1])


@pytest.mark.parametrize("weights", ["channel", "tensor"])
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "numbers"),
    [
        (37, 100, torch.bfloat16, [1, MOST_ROWS]),
        (9, 2500, torch.float16, [3]),
        pytest.param(541, 24, torch.bfloat16, [2], marks=pytest.mark.slow),
    ],
)
def test_few_rows_are_not_rounded(
    outputs: int, inputs: int, dtype: torch.dtype, numbers: list[int], weights: str
) -> None:
    """As float64 has it of the rounded weights, with a bias and without, for outputs and inputs that fill no program;
    rows lie apart. A row gives the same bits beside others."""
    weight, bias = random(outputs, inputs, dtype=torch.float32), random(outputs, dtype=dtype, seed=1)
    weight[outputs // 2] *= 10
    for rows in numbers:
        added = bias if rows % 2 else None
        layer = body(weights=weights).pack(*whole_layer("linear", weight, added))
        held = (layer.codes.double() * layer.scales.double().T)[:outputs, :inputs]
        x = random(rows, inputs + 8, dtype=dtype, seed=2)[:, 8:]
        x[0] *= 10
        found = body(weights=weights).linear(x, layer)
        expected = x.double() @ held.T + (0 if added is None else added.double())
        near = 2.0**-7 * expected.abs() + 1e-5 * (x.double().abs() @ held.abs().T)  # the interpreter cuts off
        assert found.dtype == dtype and found.is_contiguous() and found.shape == (rows, outputs)
        assert (found.double() - expected).abs().le(near).all()
        assert torch.equal(body(weights=weights).linear(x[-1:], layer), found[-1:])


@needs_scales_of_rows
def test_how_many_rows_are_few() -> None:
    """--quantization.few_rows: up to so many are not rounded; with 0, none."""
    weight, x = random(48, 96, dtype=torch.float32), random(MOST_ROWS + 1, 96)
    layer = body().pack(*whole_layer("linear", weight))
    whole = body(few_rows=0).linear(x, layer)
    for most in (0, 2, MOST_ROWS):
        for rows in range(1, MOST_ROWS + 2):
            found = body(few_rows=most).linear(x[:rows], layer)
            assert torch.equal(found, whole[:rows]) == (rows > most), (most, rows)
    for wrong in (-1, MOST_ROWS + 1):
        with pytest.raises(ValueError, match="few_rows"):
            Fp8Options(few_rows=wrong)


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1024, 2048), (1024, 3072), (64, 32)])
def test_there_are_programs_for_all_of_a_gpu(outputs: int, inputs: int) -> None:
    block, width = few.blocks(outputs, inputs)
    assert -(-outputs // block) >= min(outputs, few.PROGRAMS) and few.VECTOR <= width <= few.WIDTH


def few_rows_cases(rows: tuple[int, ...], shapes: tuple[tuple[int, int], ...], target: str) -> list[compiled.Case]:
    cases = []
    for outputs, inputs in shapes:
        block, width = few.blocks(outputs, inputs)
        signature = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "bias": "*bf16", "out": "*bf16",
                     "x_stride": "i32", "outputs": "i32", "rows": "i32"}  # fmt: skip
        more = {"COLUMNS": inputs, "INPUTS": inputs, "OUTPUTS": block, "WIDTH": width, "VECTOR": few.VECTOR}
        for count in rows:
            cases.append(
                compiled.Case(
                    few.few_rows_kernel, signature, more | {"ROWS": count}, target, few.WARPS,
                    multiples_of_16=["x_stride", "outputs"],
                )
            )  # fmt: skip
    return cases


def check_few_rows(cases: list[compiled.Case]) -> None:
    """No register in memory, and so few that three programs fit a multiprocessor; 16 weights a load; converted by the
    instruction that there is."""
    for case, use in zip(cases, compiled.compile_all(cases), strict=True):
        what = (case.constexprs, use.registers, use.spilled)
        assert use.spilled == 0 and use.registers <= 168, what
        assert len(re.findall(r"ld\.global\S*\.v4\.\S*32", use.assembly)) >= 4, what
        assert "cvt.rn.f16x2.e4m3x2" in use.assembly, what


def test_few_rows_compile_for_hopper() -> None:
    check_few_rows(few_rows_cases((1, 4), ((4096, 14336),), "sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_few_rows_compile_for_every_shape(target: str) -> None:
    check_few_rows(few_rows_cases((1, 2, 4), ((6144, 4096), (1024, 2048), (4096, 14336)), target))


def test_how_large_it_is() -> None:
    packed = body().pack(*whole_layer("linear", random(64, 1024)))
    assert body().packed_bytes(packed) == 64 * (1024 + 4)


def test_the_card() -> None:
    need = QuantizationNeed(kind="linear", dtype="bfloat16", stored_dtype="bfloat16", device=DEVICE)
    assert Fp8Quantization.unsupported(need) == []
    other = QuantizationNeed(kind="linear", dtype="float32", stored_dtype="float8_e4m3fn", device="xpu")
    for word, reason in zip(("xpu", "float32", "float8"), Fp8Quantization.unsupported(other), strict=True):
        assert word in reason


def test_gpus_that_it_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its reason; none on a processor."""
    from engine_cuda import nvidia
    from engine_cuda.gpu import Gpu, Gpus, TorchBuild
    from engine_cuda.machine import Machine

    def reasons(gpu: Gpu, **build: Any) -> list[str]:
        maker = "AMD" if gpu.target else "NVIDIA"
        gpus = Gpus(maker=maker, visible=(gpu,), installed=1, driver="580.1", serves=(13, 0))
        nvidia_gpus, amd_gpus = (None, gpus) if gpu.target else (gpus, None)
        machine = Machine(nvidia_gpus, amd_gpus, TorchBuild("2.11", **build))
        monkeypatch.setattr(nvidia, "machine", lambda: machine)
        return nvidia.wrong_gpu("cuda", (8, 9))

    assert reasons(Gpu("H100", 80 << 30, capability=(9, 0)), cuda=(13, 0)) == []
    assert reasons(Gpu("A100", 80 << 30, capability=(8, 0)), cuda=(13, 0)) == [
        "it needs compute capability 8.9 or later, the GPU has 8.0"
    ]
    assert reasons(Gpu("MI300X", 80 << 30, target="gfx942"), rocm="7.2") == ["it is for NVIDIA's GPUs, not for AMD's"]
    assert nvidia.wrong_gpu("cpu") == []
    reasons(Gpu("RTX 5090", 32 << 30, capability=(12, 0)), cuda=(13, 0))
    assert nvidia.wrong_gpu("cuda", (8, 9)) == []
    need = QuantizationNeed(kind="linear", dtype="bfloat16", stored_dtype="bfloat16", device="cuda")
    assert "it is not for compute capability 12.x, which the GPU has" in Fp8Quantization.unsupported(need)


def test_it_compiles() -> None:
    """For Hopper: a row of 4096 in registers, in accesses of 16 bytes, rounded by the instruction that there is."""
    constants = CONSTANTS | {"ROWS": 1, "BLOCK": 4096, "LOOPS": False, "GATED": False}
    aligned = ("row_stride", "columns", "padded")
    kernel = kernels._quantize_rows_kernel
    found = compiled.compile_for(kernel, LAUNCH, constants, num_warps=8, multiples_of_16=aligned)
    assert found.spilled == 0 and found.registers <= 64
    assert "ld.global.v4" in found.assembly and "cvt.rn.satfinite.e4m3x2.f32" in found.assembly


def test_rows_that_are_rounded_as_they_are_made_compile() -> None:
    """For Hopper, of the 8B model's widths: in so few registers that two programs of 16 warps fit a multiprocessor, in
    accesses of 16 bytes, as dependents that wait first."""
    aligned = ("row_stride", "columns", "padded")
    gated = CONSTANTS | {"ROWS": 1, "BLOCK": 16384, "LOOPS": False, "GATED": True}
    normed = CONSTANTS | {"SIZE": 4096, "PADDED": 4096, "ROWS": 1, "BLOCK": 4096}
    cases = [
        compiled.Case(kernels._quantize_rows_kernel, LAUNCH, gated, num_warps=16, multiples_of_16=aligned),
        compiled.Case(kernels._normed_rows_kernel, NORMED, normed, num_warps=8),
    ]
    for found in compiled.compile_all(cases):
        assert found.spilled == 0 and found.registers <= 64
        for part in ("ld.global.v4", "cvt.rn.satfinite.e4m3x2.f32", "griddepcontrol.wait"):
            assert part in found.assembly
        assert found.assembly.index("griddepcontrol.wait") < found.assembly.index("ld.global")


@pytest.mark.slow
def test_all_forms_compile() -> None:
    """Rows that fill the registers, rows that are read twice, many short ones; Ada has no target among the tool's."""
    kernel, cases = kernels._quantize_rows_kernel, []
    for target in ("sm_90", "sm_100"):
        for each, block, loops, warps in ((1, 16384, False, 16), (1, 8192, True, 16), (32, 16, False, 1)):
            for gated in (False, True):
                more = {"ROWS": each, "BLOCK": block, "LOOPS": loops, "GATED": gated, "DEPENDENT": False}
                cases.append(compiled.Case(kernel, LAUNCH, CONSTANTS | more, target, warps))
    assert all(found.spilled == 0 for found in compiled.compile_all(cases))
