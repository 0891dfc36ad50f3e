"""The linear layer beside oneDNN's: `python plugins/cpu/benchmarks/linear.py`.

Weights of more than the caches hold are gone through in turn by all three: this package's, oneDNN with weights that it
packed (bfloat16, where there is AVX-512), and torch's own. Printed are gigabytes of weights and billions of operations
a second, medians of five turns, and the medians of the turns' ratios. Processor time counts with one thread, so that
other work on the machine does not; with several, time on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine_cpu.packed import PackedLinear

BYTES = 160 << 20
TURNS = 5


def contestants(weight: torch.Tensor, linear: PackedLinear) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """A layer three times (twice in float32, and where oneDNN has nothing for bfloat16)."""
    packed = linear.pack(str(weight.dtype).removeprefix("torch."), weight, None)
    layers = [lambda x: linear.linear(x, packed), lambda x: F.linear(x, weight)]
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        theirs = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        layers.append(lambda x: torch.ops.mkldnn._linear_pointwise(x, theirs, None, "none", [], ""))
    return layers


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", default="auto")
    parser.add_argument("--shape", default="6144x1024", help="outputs x inputs; the default is a gate and up of 0.6B")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256,1024")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.thread_time if asked.threads == 1 else time.perf_counter
    outputs, inputs = map(int, asked.shape.split("x"))
    linear = PackedLinear("ops", asked.level)
    for dtype in (torch.bfloat16, torch.float32):
        count = max(2, BYTES // (outputs * inputs * dtype.itemsize))
        layers = [contestants((torch.randn(outputs, inputs) / 32).to(dtype), linear) for _ in range(count)]
        for rows in map(int, asked.rows.split(",")):
            x, some = torch.randn(rows, inputs).to(dtype), layers if rows <= 64 else layers[:2]
            seconds: list[list[float]] = [[] for _ in layers[0]]
            for _ in range(TURNS):
                for who, taken in enumerate(seconds):
                    start = clock()
                    for layer in some:
                        layer[who](x)
                    taken.append(clock() - start)
            numbers = len(some) * outputs * inputs
            text = f"{dtype!s:15} {rows:5} rows"
            for name, taken in zip(("ours", "torch", "oneDNN packed"), seconds, strict=False):
                median = statistics.median(taken) * 1e9
                text += (
                    f"   {name} {numbers * dtype.itemsize / median:5.1f} GB/s {2 * numbers * rows / median:6.0f} GOP/s"
                )
            for taken in seconds[1:]:
                text += f"   {statistics.median(b / a for a, b in zip(seconds[0], taken, strict=True)):5.2f} x"
            print(text)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
