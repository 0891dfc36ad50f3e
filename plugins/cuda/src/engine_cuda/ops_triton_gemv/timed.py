"""Which library computes a product: for each matrix and number of rows the one that was the fastest at start.

Every step that is captured runs first as it is; then each product of a size that is new is timed by every way that
there is, on a cold cache, as layers find it: their weights never lie there. Recorded steps and later ones take what
was found. What comes only while requests are computed is not timed, for all would wait for it: it goes to torch's
usual library.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine_cuda.platform_cuda.late import late_kernels

logger = logging.getLogger(__name__)

MOST_ROWS = 1024
"""Of a product that is timed: as many as captured steps have."""
CACHE_BYTES = 256 << 20
"""Written before each product: several times what a GPU's cache holds."""
ROUNDS = 9
USUAL = "torch"
LIBRARIES = {"cuBLAS": "cublas", "cuBLASLt": "cublaslt"}
"""As `torch.backends.cuda.preferred_blas_library` calls them."""


class Matrix(Protocol):
    """What is multiplied with: weight [O, I], bias [O] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def fits(self, rows: int, normed: bool) -> bool:
        """Whether the kernel for few rows takes so many."""


Way = Callable[[torch.Tensor, Any], torch.Tensor]


def usual(x: torch.Tensor, packed: Matrix) -> torch.Tensor:
    """By the library that torch takes of itself."""
    return F.linear(x, packed.weight, packed.bias)


def by_library(name: str) -> Way:
    """By one of LIBRARIES."""

    def compute(x: torch.Tensor, packed: Matrix) -> torch.Tensor:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(name)
        try:
            return usual(x, packed)
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return compute


def cold_seconds(run: Callable[[], Any]) -> float:
    """Of what it launches, the median, where nothing that it reads lies in a cache."""
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    taken = []
    for _ in range(ROUNDS):
        cache.zero_()  # the launches behind it are queued while it runs
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def may_time() -> bool:
    """Nothing is recorded, and no request waits."""
    return not (late_kernels.serving or torch.cuda.is_current_stream_capturing())


class TimedProducts:
    """Computes products.

    Args:
        few_rows: the kernel for few rows; it says by `Matrix.fits` which it takes.
        machine: names the GPU and the libraries: what was found on another holds for nothing here.
        file: where it is kept for the next start; None: nowhere.
        seconds_of: how long something takes. may: whether it can be asked now.
    """

    def __init__(
        self,
        few_rows: Way,
        machine: str,
        file: Path | None,
        seconds_of: Callable[[Callable[[], Any]], float] = cold_seconds,
        may: Callable[[], bool] = may_time,
    ) -> None:
        self._ways: dict[str, Way] = {USUAL: usual, **{name: by_library(own) for name, own in LIBRARIES.items()}}
        self._ways["triton"] = few_rows
        self._machine = machine
        self._file = file
        self._seconds_of = seconds_of
        self._may = may
        self._chosen = self._stored().get(machine, {})

    def __call__(self, x: torch.Tensor, packed: Matrix) -> torch.Tensor:
        """x [T, I] -> [T, O]."""
        outputs, inputs = packed.weight.shape
        key = f"{outputs} x {inputs}, {len(x)} rows, {x.dtype}{'' if packed.bias is None else ', bias'}"
        name = self._chosen.get(key)
        if name is None and 0 < len(x) <= MOST_ROWS and self._may():
            name = self._chosen[key] = self._time(key, x, packed)
            self._write()
        return self._ways[name or USUAL](x, packed)

    def _time(self, key: str, x: torch.Tensor, packed: Matrix) -> str:
        """The fastest way. The usual one where none is."""
        fit = packed.fits(len(x), False)
        found = {
            name: self._seconds_of(lambda way=way: way(x, packed))  # type: ignore[misc]
            for name, way in self._ways.items()
            if fit or name != "triton"
        }
        best = min(found, key=lambda name: found[name])  # of equals the first
        others = ", ".join(f"{name} {1e6 * seconds:.1f}" for name, seconds in found.items() if name != best)
        logger.info("product %s: %s, %.1f us (%s)", key, best, 1e6 * found[best], others)
        return best

    def _stored(self) -> dict[str, dict[str, str]]:
        """What the file says, by machine; nothing where there is none, or a broken one."""
        if self._file is None or not self._file.exists():
            return {}
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {
                machine: {key: name for key, name in of_machine.items() if name in self._ways}
                for machine, of_machine in found.items()
            }
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("the products of %s are timed anew: it cannot be read: %s", self._file, error)
            return {}

    def _write(self) -> None:
        """Whole or not at all, beside what others have found; of engines that write at once one may lose its own."""
        if self._file is None:
            return
        try:
            stored = self._stored()
            stored[self._machine] = stored.get(self._machine, {}) | self._chosen
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
            temporary.write_text(json.dumps(stored, indent=1), encoding="utf-8")
            temporary.replace(self._file)
        except OSError as error:
            logger.warning("what products were found is not kept: %s", error)
            self._file = None


def machine_of(device: torch.device) -> str:
    """A GPU's, with the versions of what computes on it."""
    import triton

    name = torch.cuda.get_device_name(device)
    return ", ".join((name, f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"triton {triton.__version__}"))
