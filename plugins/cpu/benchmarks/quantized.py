"""Quantised linear layers beside bfloat16: `python plugins/cpu/benchmarks/quantized.py`.

Weights of more than the caches hold are gone through in turn, layer after layer, by each driver (A B C A B C). Printed
are gigabytes of stored weights a second, billions of operations a second, and the median of the rounds' ratios of time
to bfloat16's; and before and after, what reading alone reaches. Processor time counts with one thread, so that other
work on the machine does not; with several, time on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from engine_cpu.packed import Packed, PackedLinear
from engine_kit.ggml_blocks import TYPES

BYTES = 160 << 20
"""Of the plain weights."""
ROUNDS = 5
BLOCKS = ("q4_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
"""Of GGUF files, with random bits."""
FORMS = (("bfloat16", 0), ("int8", 0), ("int4", 32), ("int4", 64), ("int4", 128), *((kind, 0) for kind in BLOCKS))


def read_speed(clock: Callable[[], float]) -> float:
    """Gigabytes a second of a sum over memory."""
    memory, rates = torch.ones(256 << 17, dtype=torch.int64), []
    for _ in range(ROUNDS):
        start = clock()
        memory.sum()
        rates.append(memory.nbytes / (clock() - start) / 1e9)
    return statistics.median(rates)


def _packed(linear: PackedLinear, form: str, weight: torch.Tensor, group: int) -> Packed:
    if form not in BLOCKS:
        return linear.pack(form, weight, None, group)
    outputs, inputs = weight.shape
    each = TYPES[form.upper()]
    blocks = torch.randint(0, 64, (outputs, inputs // each.inputs * each.bytes), dtype=torch.uint8)
    return linear.pack_blocks(form, blocks, inputs, None)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", default="auto")
    parser.add_argument("--shape", default="6144x1024", help="outputs x inputs")
    parser.add_argument("--rows", default="1,4,16,64,256,1024")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.thread_time if asked.threads == 1 else time.perf_counter
    outputs, inputs = map(int, asked.shape.split("x"))
    linear = PackedLinear("quantization", asked.level)
    count = max(2, BYTES // (outputs * inputs * 2))
    weights = [(torch.randn(outputs, inputs) / 32).bfloat16() for _ in range(count)]
    packed: list[list[Any]] = [[_packed(linear, form, w, group) for w in weights] for form, group in FORMS]
    print(f"reading alone: {read_speed(clock):.1f} GB/s")
    for rows in map(int, asked.rows.split(",")):
        x = torch.randn(rows, inputs).bfloat16()
        seconds: list[list[float]] = [[] for _ in FORMS]
        layers = count if rows <= 64 else 2
        for _ in range(ROUNDS):
            for form, taken in zip(packed, seconds, strict=True):
                start = clock()
                for layer in form[:layers]:
                    linear.linear(x, layer)
                taken.append(clock() - start)
        for (form, group), layers_of, taken in zip(FORMS, packed, seconds, strict=True):
            median = statistics.median(taken)
            gigabytes = sum(layer.nbytes for layer in layers_of[:layers]) / 1e9
            operations = 2 * rows * outputs * inputs * layers / 1e9
            ratio = statistics.median(plain / own for plain, own in zip(seconds[0], taken, strict=True))
            name = form + (f" by {group}" if group else "")
            print(
                f"{name:12} {rows:5} rows   {gigabytes / median:5.1f} GB/s   {operations / median:6.0f} GOP/s"
                f"   {ratio:5.2f} x bfloat16"
            )
    print(f"reading alone: {read_speed(clock):.1f} GB/s")
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
