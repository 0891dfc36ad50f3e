"""The matrix products of a decode step alone, shape by shape: where a stream loses against what the memory can do.

Weights are drawn on the device, several of each shape, more than its caches hold, and the products are replayed as one
CUDA graph: no launch is waited for.

python -m tests.gpu.bench_linear --rows 1,256
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


def product_seconds(inputs: int, outputs: int, rows: int) -> float:
    """Of one product in bfloat16, the median of several rounds."""
    copies = -(-CACHED // (2 * inputs * outputs))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)  # as `linear` of the ops computes it

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


def main() -> None:
    """Rows for each model, of one stream and of many."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_linear", description=__doc__)
    flags.add_argument("--rows", default="1,256")
    asked = flags.parse_args()
    for title, sizes in MODELS.items():
        for rows in map(int, asked.rows.split(",")):
            tell(measure(title, sizes, rows))


if __name__ == "__main__":
    main()
