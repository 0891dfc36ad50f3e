"""What the GPU can do: a kernel that only reads, and a bf16 matrix product, each the best of several rounds."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from tests.gpu.rows import Ceilings, tell

READ_BYTES = 4 << 30
SIDES = (8192, 12288)
ROUNDS = 12


def best_seconds(launch: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The shortest of several launches, by the device's own clock."""
    for _ in range(3):
        launch()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def read_gb_s() -> float:
    """10^9 bytes a second: the better of torch's reductions and of a kernel that adds up words and writes next to
    nothing."""
    words = torch.zeros(min(READ_BYTES, torch.cuda.mem_get_info()[0] // 3) // 4, dtype=torch.int32, device="cuda")
    floats = words.view(torch.float32)
    size = words.numel() * 4
    launches: list[tuple[Callable[[], object], int]] = [
        (lambda: torch.sum(floats), size),
        (lambda: torch.amax(floats), size),
    ]
    try:
        from tests.gpu.read_kernel import reader

        launches.append(reader(words))
    except ImportError:  # without Triton
        pass
    found = []
    for launch, num_bytes in launches:
        try:
            found.append(num_bytes / best_seconds(launch) / 1e9)
        except Exception as error:  # another compiler than the one it was written for: torch's own are left
            print(f"a reader failed: {type(error).__name__}: {error}")
    return max(found)


def matrix_tflop_s() -> float:
    """10^12 operations a second of square products in bfloat16, on normal random numbers: zeros would draw less power
    and run faster."""
    found = []
    for side in SIDES:
        a, b = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        found.append(2 * side**3 / best_seconds(lambda: torch.mm(a, b.t(), out=out)) / 1e12)  # noqa: B023
    return max(found)


def versions() -> str:
    """What computes, in a line."""
    import triton

    return f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}"


def main() -> None:
    """Measure and tell."""
    name = torch.cuda.get_device_name()
    tell(Ceilings(device=name, versions=versions(), gb_s=read_gb_s(), tflop_s=matrix_tflop_s()))


if __name__ == "__main__":
    main()
