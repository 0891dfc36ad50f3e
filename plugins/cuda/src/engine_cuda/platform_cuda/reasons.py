"""Why a machine's GPUs cannot be used, and what they are called where they can: from facts, without torch."""

from __future__ import annotations

from engine_cuda.gpu import Gpu, Gpus, TorchBuild
from engine_cuda.machine import Machine

LEAST = (7, 5)
"""Compute capability: below it neither torch's builds for CUDA 12.8 and later have kernels, nor Triton."""
BFLOAT16 = (8, 0)
"""Compute capability from which tensor cores multiply bfloat16."""
BLACKWELL, BLACKWELL_CUDA = (10, 0), (12, 8)
"""Compute capability, and the first CUDA whose builds have kernels for it."""
_INDEX = "https://download.pytorch.org/whl/"
_GIGABYTE = 1 << 30


def why_not(machine: Machine, dtype: str = "auto") -> list[str]:
    """Reasons for `Card.unsupported`, one sentence each; empty where the GPUs that torch sees can be used."""
    if machine.torch is None:
        return ["torch is not installed: pip install torch"]
    used = machine.used
    reason = _no_gpu(machine, machine.torch) if used is None else _unfit(used, machine.torch)
    if reason:
        return [reason]
    return _dtype(machine, dtype)


def dtypes_of(machine: Machine) -> tuple[str, ...]:
    """What the GPUs compute in, best first."""
    capability = machine.capability
    if capability is None or capability >= BFLOAT16:
        return ("bfloat16", "float16", "float32", "float64")
    return ("float16", "float32", "float64")


def name_of(machine: Machine) -> str:
    """E.g. "NVIDIA H100 80GB HBM3, 80 GB, CUDA 13.0". `why_not` gave no reason."""
    used, torch = machine.used, machine.torch
    assert used is not None and torch is not None
    toolkit = f"ROCm {torch.rocm}" if torch.rocm else f"CUDA {_dotted(torch.cuda)}"
    of_one = [f"{gpu.name}, {round(gpu.total_bytes / _GIGABYTE)} GB" for gpu in used.visible]
    counts = {text: of_one.count(text) for text in of_one}
    shown = (text if count == 1 else f"{count} x {text}" for text, count in counts.items())
    return f"{'; '.join(shown)}, {toolkit}"


def _no_gpu(machine: Machine, torch: TorchBuild) -> str:
    """Why there is nothing that this torch computes on."""
    there = next((gpus for gpus in (machine.nvidia, machine.amd) if gpus is not None and gpus.visible), None)
    if there is not None:
        return _other_build(there, torch)
    for gpus in (machine.nvidia, machine.amd):
        if gpus is not None and gpus.installed:
            hidden = gpus.hidden_by or "the environment"
            return f"{hidden} hides all {gpus.installed} GPUs of this machine: unset it, or name some of them"
    for gpus in (machine.nvidia, machine.amd):
        if gpus is not None and gpus.problem:
            return (
                f"{gpus.maker}'s driver is there and cannot be asked ({gpus.problem}): see what `nvidia-smi` says, and "
                "whether the container was given the GPUs"
            )
    return "this machine has no GPU that a process can use: neither NVIDIA's driver nor AMD's shows one"


def _other_build(gpus: Gpus, torch: TorchBuild) -> str:
    built = f"CUDA {_dotted(torch.cuda)}" if torch.cuda else f"ROCm {torch.rocm}" if torch.rocm else "processors alone"
    return f"torch {torch.version} is built for {built}, and the GPU is {_called(gpus.visible[0], gpus)}: {_pip(gpus)}"


def _unfit(used: Gpus, torch: TorchBuild) -> str:
    if torch.cuda is None:
        return ""
    if used.serves is not None and used.serves[0] < torch.cuda[0]:  # a driver serves all of its major version
        driver = f"driver {used.driver} " if used.driver else "the driver "
        return (
            f"{driver}is too old: it serves CUDA {_dotted(used.serves)}, and torch {torch.version} is built for CUDA "
            f"{_dotted(torch.cuda)}: update the driver, or {_pip(used)}"
        )
    for gpu in used.visible:
        if gpu.capability is None:
            continue
        if gpu.capability < LEAST:
            return (
                f"{gpu.name} has compute capability {_dotted(gpu.capability)}, and {_dotted(LEAST)} (Turing) is the "
                "least for which torch's builds and Triton's kernels are made: use a newer GPU"
            )
        if gpu.capability >= BLACKWELL and torch.cuda < BLACKWELL_CUDA:
            return (
                f"torch {torch.version} is built for CUDA {_dotted(torch.cuda)}, which has no kernels for {gpu.name} "
                f"(compute capability {_dotted(gpu.capability)}): {_pip(used)}"
            )
    return ""


def _dtype(machine: Machine, dtype: str) -> list[str]:
    served = dtypes_of(machine)
    if dtype == "auto" or dtype in served:
        return []
    if dtype == "bfloat16":
        assert machine.capability is not None
        return [
            f"bfloat16 needs compute capability {_dotted(BFLOAT16)} (Ampere), and the GPU has "
            f"{_dotted(machine.capability)}: use --dtype float16"
        ]
    return [f"dtype {dtype} is not one of {', '.join(served)}"]


def _pip(gpus: Gpus) -> str:
    """The line that installs a torch for these GPUs."""
    if gpus.maker == "AMD":
        index = "rocm7.2"
    elif gpus.serves is None or gpus.serves >= (13, 0):
        index = "cu130"
    else:
        index = "cu126"
    return f"pip install --force-reinstall torch --index-url {_INDEX}{index}"


def _called(gpu: Gpu, gpus: Gpus) -> str:
    return f"an {gpu.name if gpu.name.startswith(gpus.maker) else f'{gpus.maker} {gpu.name}'}"


def _dotted(version: tuple[int, int] | None) -> str:
    return "" if version is None else f"{version[0]}.{version[1]}"
