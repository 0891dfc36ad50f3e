"""What the card of `cuda` says of machines that are made up, and of this one."""

from __future__ import annotations

import pytest

from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.interfaces.platform import PlatformNeed
from engine.types.errors import UnfitDriverError
from engine_cuda.gpu import Gpu, Gpus, TorchBuild
from engine_cuda.machine import Machine, machine
from engine_cuda.platform_cuda.card import CudaPlatform, CudaPlatformOptions
from engine_cuda.platform_cuda.reasons import dtypes_of, name_of, why_not

CPU, CU130, CU126, ROCM = (
    TorchBuild("2.13.0+cpu"),
    TorchBuild("2.11.0+cu130", (13, 0)),
    TorchBuild("2.11.0+cu126", (12, 6)),
    TorchBuild("2.11.0+rocm7.2", None, "7.2"),
)
MI300 = Gpus(maker="AMD", visible=(Gpu("AMD Instinct MI300X (gfx942)", 192 << 30, target="gfx942"),), installed=1)
NO_LINE = "this machine has no GPU that a process can use: neither NVIDIA's driver nor AMD's shows one"


def nvidia(
    name: str = "NVIDIA H100 80GB HBM3",
    capability: tuple[int, int] = (9, 0),
    count: int = 1,
    serves: tuple[int, int] = (13, 0),
) -> Gpus:
    gpus = (Gpu(name, 85_520_809_984, None, capability),) * count
    return Gpus(maker="NVIDIA", visible=gpus, installed=count, driver="580.65.06", serves=serves)


def reason(*facts: object, dtype: str = "auto") -> str:
    """The one reason, a sentence without a line break, or "" for none."""
    reasons = why_not(Machine(*facts), dtype)  # type: ignore[arg-type]
    assert len(reasons) <= 1 and not any("\n" in text or text.endswith(".") for text in reasons)
    return reasons[0] if reasons else ""


def test_memory_is_that_of_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """None where no GPU is used, or the driver does not say."""
    small = Gpu("small", 8 << 30, None, (9, 0))
    two = Gpus(maker="NVIDIA", visible=(*nvidia().visible, small), installed=2)
    silent = Gpus(maker="NVIDIA", visible=(small._replace(total_bytes=0),), installed=1)
    for facts, expected in (((two, None, CU130), 8 << 30), ((None, None, CU130), None), ((silent, None, CU130), None)):
        monkeypatch.setattr("engine_cuda.platform_cuda.card.machine", lambda facts=facts: Machine(*facts))
        assert CudaPlatform.memory() == expected


def test_steps_are_larger_on_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Gpus(maker="NVIDIA", visible=(*nvidia().visible, Gpu("small", 24 << 30, None, (8, 9))), installed=2)
    for gpus, expected in ((nvidia(), 8192), (small, 2048), (None, 2048)):
        monkeypatch.setattr("engine_cuda.platform_cuda.card.machine", lambda gpus=gpus: Machine(gpus, None, CU130))
        assert CudaPlatform.step_tokens() == expected


def test_no_gpu() -> None:
    empty = Gpus(maker="NVIDIA", driver="580.65.06")
    assert reason(None, None, CU130) == reason(empty, None, CPU) == NO_LINE
    hidden = Gpus(maker="NVIDIA", installed=2, hidden_by="CUDA_VISIBLE_DEVICES=-1")
    assert reason(hidden, None, CU130).startswith("CUDA_VISIBLE_DEVICES=-1 hides all 2 GPUs of this machine")
    broken = Gpus(maker="NVIDIA", problem="Driver/library version mismatch")
    assert "(Driver/library version mismatch): see what `nvidia-smi` says" in reason(broken, None, CU130)
    assert reason(nvidia(), None, None) == "torch is not installed: pip install torch"


def test_another_build_of_torch() -> None:
    """Which torch is there, for what, what the GPU is, and the line that helps."""
    line = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
    assert reason(nvidia(), None, CPU) == (
        f"torch 2.13.0+cpu is built for processors alone, and the GPU is an NVIDIA H100 80GB HBM3: {line}cu130"
    )
    assert reason(nvidia(serves=(12, 9)), None, CPU).endswith(f"{line}cu126")
    assert reason(None, MI300, CU130) == (
        "torch 2.11.0+cu130 is built for CUDA 13.0, and the GPU is an AMD Instinct MI300X (gfx942): " + line + "rocm7.2"
    )
    assert "built for ROCm 7.2" in reason(nvidia(), None, ROCM)
    assert reason(nvidia(), MI300, ROCM) == reason(nvidia(), MI300, CU130) == ""


def test_driver_and_gpu_against_torch() -> None:
    assert reason(nvidia(serves=(12, 4)), None, CU130) == (
        "driver 580.65.06 is too old: it serves CUDA 12.4, and torch 2.11.0+cu130 is built for CUDA 13.0: update the "
        "driver, or pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
    )
    assert reason(nvidia(serves=(12, 4)), None, CU126) == ""  # any driver of a major version serves all of it
    volta = reason(nvidia("Tesla V100", (7, 0)), None, CU126)
    assert volta.startswith("Tesla V100 has compute capability 7.0, and 7.5 (Turing) is the least for which")
    blackwell = reason(nvidia("NVIDIA B200", (10, 0)), None, CU126)
    assert "which has no kernels for NVIDIA B200 (compute capability 10.0)" in blackwell and "cu130" in blackwell
    assert reason(nvidia("NVIDIA B200", (10, 0)), None, CU130) == ""


def test_dtypes() -> None:
    turing = Machine(nvidia("Tesla T4", (7, 5)), None, CU130)
    assert dtypes_of(turing) == ("float16", "float32", "float64")
    assert reason(*turing, dtype="bfloat16") == (
        "bfloat16 needs compute capability 8.0 (Ampere), and the GPU has 7.5: use --dtype float16"
    )
    assert reason(*turing, dtype="float16") == reason(nvidia(), None, CU130, dtype="bfloat16") == ""
    assert reason(None, MI300, ROCM, dtype="bfloat16") == ""
    assert reason(nvidia(), None, CU130, dtype="float3").startswith("dtype float3 is not one of bfloat16, float16")


def test_names() -> None:
    assert name_of(Machine(nvidia(), None, CU130)) == "NVIDIA H100 80GB HBM3, 80 GB, CUDA 13.0"
    assert name_of(Machine(nvidia(count=8), None, CU130)) == "8 x NVIDIA H100 80GB HBM3, 80 GB, CUDA 13.0"
    assert name_of(Machine(None, MI300, ROCM)) == "AMD Instinct MI300X (gfx942), 192 GB, ROCm 7.2"
    mixed = Gpus(maker="NVIDIA", visible=(*nvidia().visible, Gpu("NVIDIA L4", 24 << 30, None, (8, 9))), installed=2)
    assert name_of(Machine(mixed, None, CU130)) == "NVIDIA H100 80GB HBM3, 80 GB; NVIDIA L4, 24 GB, CUDA 13.0"


def test_options() -> None:
    assert CudaPlatformOptions(buckets=(4, 1)).buckets == (4, 1)
    assert CudaPlatformOptions.model_validate({"buckets": "1,2, 16"}).buckets == (1, 2, 16)
    assert CudaPlatformOptions.model_validate({"buckets": "auto"}).buckets == "auto"
    assert CudaPlatformOptions.model_validate({"capture_mixed": "never"}).capture_mixed == "never"
    assert CudaPlatformOptions.model_validate({"capture_mixed": "96,256"}).capture_mixed == (96, 256)
    for wrong in (
        {"capture": "yes"},
        {"buckets": (0,)},
        {"buckets": "few"},
        {"buckets": "never"},
        {"capture_mixed": "always"},
        {"buckets": ()},
        {"ranks_per_device": 0},
        {"graphs": 1},
    ):
        with pytest.raises(ValueError, match="validation error"):
            CudaPlatformOptions(**wrong)


@pytest.mark.skipif(machine().used is not None, reason="there is a GPU")
def test_asked_for_by_name_where_there_is_none() -> None:
    """The start stops at once, with the reason; `auto` goes by."""
    (why,) = CudaPlatform.unsupported(PlatformNeed())
    with pytest.raises(UnfitDriverError, match="use driver 'cuda' for platform") as caught:
        launch(EngineConfig(platform="cuda", model="dummy:tiny"))
    assert why in caught.value.found
    assert launch(EngineConfig(model="dummy:tiny")).start.worker.device == "cpu"
