"""What the GPU can do: a kernel that only reads, matrix products in bf16 and in fp8, each the median of several rounds,
and what a launch costs."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from statistics import median

import torch

from tests.gpu.rows import Ceilings, Row, tell

READ_BYTES = 4 << 30
SIDES = (8192, 12288)
ROUNDS = 12


def median_seconds(launch: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median of several launches, by the device's own clock."""
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
    return median(times)


def read_gb_s() -> float:
    """10^9 bytes a second: the better of torch's reductions and of a kernel that adds up words and writes next to
    nothing."""
    count = min(READ_BYTES, torch.cuda.mem_get_info()[0] // 3) // 4
    floats = torch.rand(count, device="cuda")  # zeros would draw less power
    words = floats.view(torch.int32)
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
            found.append(num_bytes / median_seconds(launch) / 1e9)
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
        found.append(2 * side**3 / median_seconds(lambda: torch.mm(a, b.t(), out=out)) / 1e12)  # noqa: B023
    return max(found)


def fp8_tflop_s() -> float:
    """The same of products in 8 bits with a scale for each row and each output, as quantization `fp8` multiplies; 0
    where the GPU, or torch for it, has none."""
    found = [0.0]
    try:
        for side in SIDES:
            a, b = (torch.randn(side, side, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
            scales = torch.ones(side, 1, device="cuda")

            def product(a: torch.Tensor = a, b: torch.Tensor = b, scales: torch.Tensor = scales) -> object:
                more = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
                return torch._scaled_mm(a, b.t(), scale_a=scales, scale_b=scales.t(), **more)

            found.append(2 * side**3 / median_seconds(product) / 1e12)
    except (RuntimeError, AttributeError) as error:
        print(f"no product in fp8: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return max(found)


LAUNCHES = 300


def launch_rows() -> list[Row]:
    """What a small launch costs: the host when it is called, and the device as a node of a graph."""
    x = torch.zeros(1024, device="cuda")

    def launches() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    launches()
    torch.cuda.synchronize()
    began = time.perf_counter()
    launches()
    host = (time.perf_counter() - began) / LAUNCHES
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    node = median_seconds(graph.replay) / LAUNCHES
    began = time.perf_counter()
    graph.replay()
    replay = time.perf_counter() - began
    result = f"{host * 1e6:.1f} us of the host each; {node * 1e6:.2f} us each as nodes of a graph of {LAUNCHES}, "
    result += f"whose launch takes the host {replay * 1e6:.0f} us"
    return [Row("a small kernel of torch", result, figures={"host": host, "node": node, "replay": replay})]


def versions() -> str:
    """What computes, in a line."""
    import triton

    return f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}"


def main() -> None:
    """Measure and tell."""
    name = torch.cuda.get_device_name()
    measured = Ceilings(name, versions(), gb_s=read_gb_s(), tflop_s=matrix_tflop_s(), fp8_tflop_s=fp8_tflop_s())
    tell(measured)
    for row in launch_rows():
        tell(row)


if __name__ == "__main__":
    main()
