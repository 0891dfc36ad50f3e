"""What the fake driver counted, and what of it waits for the device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

LAUNCHED = ("graph ", "eager ")
WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", "cuCtxSynchronize", "memcpy"),
    *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc"),
    *("cuMemFreeHost", "cuModuleLoadData", "cudaGraphInstantiate", "cudaGraphInstantiateWithFlags"),
)
"""Calls that a decode step must not make: they wait for the device, or may. `memcpy` are the blocking copies."""
EVENT = "cudaEventSynchronize"
"""A step waits for one: the end of the step before, whose tokens it hands over."""


class Counters:
    """Those of the driver that this process has loaded."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")

    def reset(self) -> None:
        """From here on."""
        self._driver.fakegpu_reset()

    def read(self) -> dict[str, int]:
        """Calls by "api NAME", kernels and copies by "eager NAME" and, in replayed graphs, "graph NAME"."""
        with tempfile.NamedTemporaryFile() as file:
            self._driver.fakegpu_dump(file.name.encode())
            rows = (line.rsplit("\t", 1) for line in Path(file.name).read_text().splitlines())
            return {name: int(count) for name, count in rows}


def launches(counted: Mapping[str, int], steps: int) -> dict[str, float]:
    """Kernels and copies a step, the most frequent first."""
    names = sorted((name for name in counted if name.startswith(LAUNCHED)), key=lambda name: -counted[name])
    return {name: round(counted[name] / steps, 2) for name in names}


def waits(counted: Mapping[str, int], steps: int) -> dict[str, int]:
    """Synchronisations among the calls of so many decode steps; none in a sound engine."""
    found = {name: n for name in WAITS if (n := counted.get(f"api {name}", 0))}
    found |= {name: n for name, n in counted.items() if name.startswith("eager") and name.endswith(" pageable")}
    if (events := counted.get(f"api {EVENT}", 0)) > steps:
        found[EVENT] = events
    return found


def readable(names: Iterable[str]) -> dict[str, str]:
    """Names of C++ as they are written, where binutils' c++filt is installed."""
    names = list(names)
    if (tool := shutil.which("c++filt")) is None:
        return {name: name for name in names}
    mangled = [name.split(" ", 1)[1] for name in names]
    text = subprocess.run([tool], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    return {name: f"{name.split(' ')[0]} {line}" for name, line in zip(names, text.split("\n"), strict=False)}
