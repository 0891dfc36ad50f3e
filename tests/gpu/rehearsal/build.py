"""Building the fake libraries with g++: some ten seconds, nothing where their sources have not changed."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.gpu.rehearsal.exports import declared, exported, stubs

NATIVE = Path(__file__).parent / "native"
DRIVER = (
    "records",
    "memory",
    "streams",
    "events",
    "graphs",
    "work",
    "h100",
    "driver",
    "driver_modules",
    "driver_streams",
)
FLAGS = ("-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers")
VERSION = "13"
"""Of CUDA: it is part of the libraries' names, and layouts of the runtime's structures differ from 12's."""


class CannotBuild(Exception):
    """What is missing, and what to do about it."""


class Toolkit(NamedTuple):
    """What of CUDA this Python's packages bring: folders of headers, and libraries whose names the fakes take."""

    headers: tuple[Path, ...]
    runtime: Path
    cublas: Path
    cublas_lt: Path
    nccl: Path


def folders(package: str) -> list[Path]:
    """Where a package lies; none where it is not installed."""
    found = importlib.util.find_spec(package)
    return [Path(folder) for folder in found.submodule_search_locations or ()] if found else []


def toolkit() -> Toolkit:
    """Raises CannotBuild where this Python has no torch for CUDA 13 with pip's packages of it."""
    cuda = [folder / f"cu{VERSION}" for folder in folders("nvidia")]
    triton = [folder / "backends" / "nvidia" / "include" for folder in folders("triton")]
    cuda = [folder for folder in cuda if (folder / "include" / "cuda_runtime_api.h").exists()]
    nccl = [each for folder in folders("nvidia") if (each := folder / "nccl" / "lib" / "libnccl.so.2").exists()]
    if not cuda or not triton or not nccl:
        raise CannotBuild(
            f"no headers and libraries of CUDA {VERSION} in this Python's packages (nvidia/cu{VERSION}, nvidia/nccl, "
            f"triton): install torch's build for CUDA {VERSION}, or name a Python that has it with "
            "GPU_PYTHON=/path/to/python3"
        )
    lib = cuda[0] / "lib"
    # What crt/ holds is in Triton's copy alone; the rest must be of the runtime's own version.
    headers = (cuda[0] / "include", triton[0])
    runtime, cublas, cublas_lt = (lib / f"lib{name}.so.{VERSION}" for name in ("cudart", "cublas", "cublasLt"))
    return Toolkit(headers, runtime, cublas, cublas_lt, nccl[0])


def compiler() -> str:
    """Raises CannotBuild where there is none."""
    found = shutil.which("g++")
    if found is None:
        raise CannotBuild("g++ is not installed: install a C++ compiler (Debian: apt install g++)")
    return found


class Builder:
    """Builds into a folder.

    Args:
        into: the folder; what is generated goes there too.
        headers: folders of CUDA's; the first has cuda.h.
        optimised: how much, in the compiler's words.
    """

    def __init__(self, into: Path, headers: Sequence[Path], optimised: str = "-O2") -> None:
        self.into = into
        self._headers = headers
        self._compile = [compiler(), *FLAGS, optimised, *(f"-isystem{folder}" for folder in headers)]

    def library(self, name: str, sources: Sequence[str], names: Sequence[str] = (), needs: Sequence[str] = ()) -> Path:
        """One library of sources (without their ending), stubs for names, and what it needs of those built before.
        Raises CannotBuild with the compiler's words."""
        target = self.into / name
        script = self.into / f"{name}.map"
        if needs:  # NVIDIA's own libraries above the driver: callers ask for their symbols by version
            script.write_text(f"{name} {{ global: *; }};\n")
        objects = []
        for source in sources:
            objects.append(str(self.into / f"{name}.{source}.o"))
            self._run([*self._compile, "-c", str(NATIVE / f"{source}.cpp"), "-o", objects[-1]])
        if names:
            generated = self.into / f"{name}.stubs.c"
            generated.write_text(stubs(names))
            objects.append(str(generated.with_suffix(".o")))
            self._run([compiler(), "-xc", "-O0", "-fPIC", "-c", str(generated), "-o", objects[-1]])
        link = [compiler(), "-shared", *objects, "-o", str(target), f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN"]
        link += [f"-Wl,--version-script={script}"] if needs else []
        self._run([*link, *(str(self.into / need) for need in needs), "-lpthread", "-ldl"])
        return target

    def driver(self) -> Path:
        """libcuda alone: what the test of its captures needs."""
        return self.library("libcuda.so.1", DRIVER, declared(self._headers[0] / "cuda.h"))

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotBuild(f"{' '.join(command)}\n{done.stderr}")


def build(into: Path) -> list[Path]:
    """All of them; those to preload, in order. Raises CannotBuild."""
    kit = toolkit()
    stamp, told = into / "stamp", _fingerprint(kit)
    driver, runtime = "libcuda.so.1", kit.runtime.name
    preloaded = [into / name for name in (driver, runtime, kit.cublas_lt.name, kit.cublas.name, kit.nccl.name)]
    if stamp.exists() and stamp.read_text() == told:
        return preloaded
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    builder = Builder(into, kit.headers)
    builder.driver()
    kernels = ("runtime", "runtime_kernels", "runtime_streams")
    builder.library(runtime, kernels, exported(kit.runtime, "(__)?cuda"), [driver])
    builder.library(kit.cublas_lt.name, ["cublas_lt"], exported(kit.cublas_lt, "cublas"), [driver])
    builder.library(kit.cublas.name, ["cublas"], exported(kit.cublas, "cublas"), [driver, kit.cublas_lt.name])
    builder.library(kit.nccl.name, ["nccl"], exported(kit.nccl, "p?nccl"), [driver])
    builder.library("libnvidia-ml.so.1", ["nvml"])
    stamp.write_text(told)
    return preloaded


def _fingerprint(kit: Toolkit) -> str:
    found = hashlib.sha256(repr(kit).encode())
    for path in sorted([*NATIVE.iterdir(), *Path(__file__).parent.glob("*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()
