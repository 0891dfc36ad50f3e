"""The linear layers of a decode step, for few rows: torch's product beside the kernel of ops driver `triton_gemv`.

python -m tests.gpu.bench_gemv

Each shape is launched on one copy of its matrix after the other, as layers are, from one captured graph: so many that
none of them is in the cache when its turn comes. Whoever is faster is what `--ops` should name on that GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.ceilings import median_seconds
from tests.gpu.rows import Row, tell

SHAPES = {
    "0.6B": {"qkv": (4096, 1024), "output": (1024, 2048), "gate and up": (6144, 1024), "down": (1024, 3072),
             "head": (151936, 1024)},
    "8B": {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336),
           "head": (128256, 4096)},
}  # fmt: skip
"""Outputs and inputs, by model and layer."""
ROWS = (1, 2, 4)
COLD_BYTES = 256 << 20
"""Of a shape's copies together: several times a cache."""

Product = Callable[[torch.Tensor, Any], torch.Tensor]


def seconds_each(product: Product, x: torch.Tensor, matrices: list[Any]) -> float:
    """Of one launch among those on all matrices, replayed from a graph; where there is no GPU, called one by one."""

    def launch() -> None:
        for matrix in matrices:
            product(x, matrix)

    if not x.is_cuda:
        launch()
        return 0.0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()  # compiles, and makes workspaces
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        launch()
    return median_seconds(graph.replay) / len(matrices)


def drivers() -> dict[str, Any]:
    """Bodies by name: they take no settings, so that none is needed to build them."""
    from engine_cuda.ops_triton_gemv.body import TritonGemvBody
    from engine_reference.ops_torch.ops import TorchOpsBody

    nothing: Any = None
    return {"torch": TorchOpsBody(nothing), "triton_gemv": TritonGemvBody(nothing)}


def measure(outputs: int, inputs: int, rows: int, device: str, cold_bytes: int) -> dict[str, float]:
    """Seconds of a launch by each driver. Raises AssertionError where their results lie apart."""
    size = outputs * inputs * 2
    copies = max(1, -(-cold_bytes // size))
    matrices = [torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5 for _ in range(copies)]
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    found, results = {}, []
    for name, ops in drivers().items():
        packed = [ops.pack_linear(matrix, None) for matrix in matrices]
        results.append(ops.linear(x, packed[0]).float())
        found[name] = seconds_each(ops.linear, x, packed)
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.05)
    return found


def main() -> None:
    """A row for each model, layer and number of rows; the figure is the bandwidth of the faster one."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_gemv", description=__doc__)
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--models", default=",".join(SHAPES))
    flags.add_argument("--cold-bytes", type=int, default=COLD_BYTES)
    flags.add_argument("--divide", type=int, default=1, help="outputs by this: for a try without a GPU")
    asked = flags.parse_args()
    for model in asked.models.split(","):
        for layer, (outputs, inputs) in SHAPES[model].items():
            for rows in ROWS:
                what = f"linear {model}, {layer} {outputs} x {inputs}, {rows} row{'s' * (rows > 1)}"
                try:
                    found = measure(outputs // asked.divide, inputs, rows, asked.device, asked.cold_bytes)
                except Exception as error:  # one shape's fault is not the others'
                    tell(Row(what=what, result=f"failed: {type(error).__name__}: {error}"[:240]))
                    continue
                size = outputs * inputs * 2
                least = min(found.values())
                tell(
                    Row(
                        what=what,
                        result=", ".join(f"{name} {each * 1e6:.1f} us" for name, each in found.items()),
                        gb_s=size / least / 1e9 if least else None,
                        share="gb_s" if least else "",
                    )
                )


if __name__ == "__main__":
    main()
