"""Quantization `fp8`: the kernel's numbers, and what its layers do beyond the suite."""

from __future__ import annotations

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
from engine_cuda.interpreter_shim import to_e4m3
from engine_cuda.quantization_fp8 import rows as kernels
from engine_cuda.quantization_fp8.body import Fp8Body
from engine_cuda.quantization_fp8.card import Fp8Options, Fp8Quantization
from engine_cuda.quantization_fp8.rows import FP8, LARGEST, quantize_rows, quantize_weight
from engine_sdk.conformance.quantization import whole_layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAUNCH = {
    "x": "*bf16", "codes": "*u8", "scales": "*fp32", "rows": "i32", "row_stride": "i32", "columns": "i32",
    "padded": "i32",
}  # fmt: skip


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


def test_it_compiles() -> None:
    """For Hopper: a row of 4096 in registers, in accesses of 16 bytes, rounded by the instruction that there is."""
    constants = {"ROWS": 1, "BLOCK": 4096, "LOOPS": False, "LARGEST": 448.0, "LEAST_SCALE": 2.0**-120}
    aligned = ("row_stride", "columns", "padded")
    kernel = kernels._quantize_rows_kernel
    found = compiled.compile_for(kernel, LAUNCH, constants, num_warps=8, multiples_of_16=aligned)
    assert found.spilled == 0 and found.registers <= 64
    assert "ld.global.v4" in found.assembly and "cvt.rn.satfinite.e4m3x2.f32" in found.assembly


@pytest.mark.slow
def test_all_forms_compile() -> None:
    """Rows that fill the registers, rows that are read twice, many short ones; Ada has no target among the tool's."""
    constants = {"LARGEST": 448.0, "LEAST_SCALE": 2.0**-120}
    kernel, cases = kernels._quantize_rows_kernel, []
    for target in ("sm_90", "sm_100"):
        for each, block, loops, warps in ((1, 16384, False, 16), (1, 8192, True, 16), (32, 16, False, 1)):
            more = {"ROWS": each, "BLOCK": block, "LOOPS": loops}
            cases.append(compiled.Case(kernel, LAUNCH, constants | more, target, warps))
    assert all(found.spilled == 0 for found in compiled.compile_all(cases))
