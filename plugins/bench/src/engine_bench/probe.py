"""What this machine can do at this moment: measured in a process of its own, before and after a run."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from engine.types.errors import EngineError
from engine_bench.statistics import spread

NOISY = 0.2
"""Two probes that lie further apart than this make a run's figures doubtful."""
TIMEOUT_SECONDS = 120


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One probe.

    Args:
        read_gb_s: 10^9 bytes a second that all threads together read from a buffer far larger than the caches.
        gflop_s: 10^9 floating-point operations a second of matrix products in `dtype`, one on each thread.
        threads: one for each core that this process may use.
        dtype: of the products.
    """

    read_gb_s: float
    gflop_s: float
    threads: int
    dtype: str


def probe(dtype: str) -> Machine:
    """Measure for about two seconds (and two more to start). Raises EngineError where the process fails."""
    command = [sys.executable, "-m", "engine_bench.probe_process", dtype]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS, check=True)
        return msgspec.json.decode(done.stdout, type=Machine)
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            "probe the machine", f"no answer in {TIMEOUT_SECONDS} s", "end what else runs here"
        ) from error
    except (subprocess.CalledProcessError, msgspec.DecodeError) as error:
        output = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else ""
        raise EngineError("probe the machine", output.strip().rpartition("\n")[2] or str(error)) from error


def probe_figures(before: Machine, after: Machine) -> dict[str, float | int | bool]:
    """Both probes as figures; `noisy` says that they lie more than 20 % apart."""
    return {
        "machine_threads": before.threads,
        "machine_gb_s_before": before.read_gb_s,
        "machine_gb_s_after": after.read_gb_s,
        "machine_gflop_s_before": before.gflop_s,
        "machine_gflop_s_after": after.gflop_s,
        "noisy": bool(warnings(before, after)),
    }


def warnings(before: Machine, after: Machine) -> list[str]:
    """A line for each probe that changed by more than 20 % during the run."""
    found = []
    for what, unit, first, second in (
        ("read bandwidth", "GB/s", before.read_gb_s, after.read_gb_s),
        ("matrix product", "GFLOP/s", before.gflop_s, after.gflop_s),
    ):
        if spread(first, second) > NOISY:
            found.append(
                f"this machine's {what} was {first:.1f} {unit} before and {second:.1f} {unit} after: something else "
                "runs here, and the figures above are doubtful"
            )
    return found
