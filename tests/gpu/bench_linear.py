"""The matrix products of a decode step alone, shape by shape: where a stream loses against what the memory can do.

Weights are drawn on the device, several of each shape, more than its caches hold, and the products are replayed as one
CUDA graph: no launch is waited for.

python -m tests.gpu.bench_linear --rows 1,256
python -m tests.gpu.bench_linear --choices --rows 1,4,8,16,64,256    # what choosing a product by shape would bring
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.gpu.ceilings import median_seconds
from tests.gpu.rows import Row, tell

CACHED = 256 << 20
"""Bytes of weights that one pass reads at least: an H100's L2 holds 50 MB, a B200's 126."""
ROUNDS = 10
TILES = (8, 16, 64)
"""Multiples that rows may be padded up to."""


class Sizes(NamedTuple):
    """Of a model's layers."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_size: int = 128

    def shapes(self) -> list[tuple[str, int, int, int]]:
        """(name, inputs, outputs, how often in a step) of each product."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return [
            ("qkv", self.hidden, q + 2 * kv, self.layers),
            ("output", q, self.hidden, self.layers),
            ("gate and up", self.hidden, 2 * self.inner, self.layers),
            ("down", self.inner, self.hidden, self.layers),
            ("head", self.hidden, self.vocab, 1),
        ]


MODELS = {
    "8B": Sizes(4096, 14336, 32, 32, 8, 128256),
    "0.6B": Sizes(1024, 3072, 28, 16, 8, 151936),
}
"""Llama 3.1 8B's and Qwen3 0.6B's."""


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""x [R, I], weight [O, I], out [R, O]."""


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """As `linear` of the ops computes it."""
    torch.mm(x, weight.t(), out=out)


def product_seconds(inputs: int, outputs: int, rows: int, product: Product = multiply) -> float:
    """Of one product in bfloat16, the median of several rounds."""
    copies = -(-CACHED // (2 * inputs * outputs))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for weight in weights:
            product(x, weight, out)

    return median_seconds(captured(step), ROUNDS) / copies


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Its launches as a graph. The first runs make libraries' workspaces, on the stream that records."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def measure(title: str, sizes: Sizes, rows: int, seconds_of: Callable[[int, int, int], float] = product_seconds) -> Row:
    """All products of a step together, and each shape's own GB/s."""
    moved = seconds = 0.0
    flops, each = 0.0, []
    for name, inputs, outputs, times in sizes.shapes():
        of_one = seconds_of(inputs, outputs, rows)
        num_bytes = 2 * (inputs * outputs + rows * (inputs + outputs))
        each.append(f"{name} {num_bytes / of_one / 1e9:,.0f}")
        moved, seconds = moved + num_bytes * times, seconds + of_one * times
        flops += 2.0 * rows * inputs * outputs * times
    return Row(
        what=f"{title} bf16, products of a step alone, batch {rows}",
        result=f"{seconds * 1e3:.2f} ms; GB/s: {', '.join(each)}",
        gb_s=moved / seconds / 1e9,
        tflop_s=flops / seconds / 1e12,
    )


def ways(inputs: int, outputs: int, rows: int) -> dict[str, float]:
    """Seconds of one product by everything that could be chosen for it; the first is what is taken today."""
    from engine_cuda.ops_triton_gemv.body import PackedWeight, few_rows  # needs Triton
    from engine_cuda.ops_triton_gemv.cuts import MOST_ROWS

    found: dict[str, float] = {}
    usual = torch.backends.cuda.preferred_blas_library()
    try:
        for name, library in (("as it is", None), ("cuBLAS", "cublas"), ("cuBLASLt", "cublaslt")):
            if library is not None:
                torch.backends.cuda.preferred_blas_library(library)
            found[name] = product_seconds(inputs, outputs, rows)
    finally:
        torch.backends.cuda.preferred_blas_library(usual)
    for tile in TILES:
        if padded := -rows % tile:
            found[f"{rows + padded} rows"] = product_seconds(inputs, outputs, rows + padded)
    if rows <= MOST_ROWS:
        found["triton_gemv"] = product_seconds(
            inputs, outputs, rows, lambda x, w, out: few_rows(x, PackedWeight(w, None))
        )
    return found


def choose(title: str, sizes: Sizes, rows: int, ways_of: Callable[[int, int, int], dict[str, float]] = ways) -> Row:
    """The products of a step as they are, and each by the fastest way; which that is, shape by shape."""
    usual = best = 0.0
    each = []
    for name, inputs, outputs, times in sizes.shapes():
        found = ways_of(inputs, outputs, rows)
        taken, seconds = next(iter(found.values())), min(found.values())
        usual, best = usual + taken * times, best + seconds * times
        fastest = min(found, key=lambda way: found[way])
        each.append(f"{name} {fastest} {seconds * 1e6:.1f} of {taken * 1e6:.1f} us")
    return Row(
        what=f"{title} bf16, products of a step by shape, batch {rows}",
        result=f"{best * 1e3:.3f} ms in place of {usual * 1e3:.3f} ({1 - best / usual:.1%} less): {', '.join(each)}",
        figures={"usual_ms": usual * 1e3, "best_ms": best * 1e3, "less": 1 - best / usual},
    )


def main() -> None:
    """Rows for each model, of one stream and of many."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_linear", description=__doc__)
    flags.add_argument("--rows", default="1,256")
    flags.add_argument("--choices", action="store_true", help="every way to compute each product, side by side")
    asked = flags.parse_args()
    for title, sizes in MODELS.items():
        for rows in map(int, asked.rows.split(",")):
            tell(choose(title, sizes, rows) if asked.choices else measure(title, sizes, rows))


if __name__ == "__main__":
    main()
