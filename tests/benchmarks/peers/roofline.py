"""What part of the machine a figure uses: W1 in bytes read, W4 in operations. The work that nobody can do without."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine_bench.probe import Machine
from engine_bench.statistics import median
from tests.benchmarks.peers.dimensions import BF16_BYTES, Dimensions
from tests.benchmarks.peers.results import Comparison

_PROMPT, _OUTPUT = 128, 128
_LONG_PROMPT = 1024


def linear_parameters(dimensions: Dimensions) -> int:
    """Weights that a token is multiplied with: all matrices but for the vocabulary's, and of experts as many as it
    uses."""
    shapes = [(name, math.prod(shape)) for name, shape in dimensions.shapes().items() if len(shape) == 2]
    layers = [(name, size) for name, size in shapes if name.startswith("model.layers.")]
    experts = sum(size for name, size in layers if ".experts." in name)
    used = experts * dimensions.experts_per_token // dimensions.num_experts if experts else 0
    return sum(size for _, size in layers) - experts + used


def bytes_per_token(dimensions: Dimensions) -> float:
    """Of one of W1's decode steps in bf16: each weight once (the input embedding is one row), and the mean of the keys
    and values."""
    head = dimensions.vocab_size * dimensions.hidden_size
    context = _PROMPT + _OUTPUT / 2
    return (linear_parameters(dimensions) + head) * BF16_BYTES + context * dimensions.kv_bytes(1)


def operations_per_prompt_token(dimensions: Dimensions) -> float:
    """Of W4: two for each weight; four for each query head's element and key that a query sees."""
    attention = 4 * dimensions.num_heads * dimensions.head_size * dimensions.num_layers * (_LONG_PROMPT + 1) / 2
    head = 2 * dimensions.vocab_size * dimensions.hidden_size / _LONG_PROMPT
    return 2 * linear_parameters(dimensions) + attention + head


def machine_share(comparison: Comparison, dimensions: Dimensions, figures: Sequence[float]) -> float | None:
    """The median over the pairs of: what a figure achieved, over the mean of the probes before and after that pair.

    Above 1 where weights lie in a cache that is faster than memory. None for work that is bound by neither alone.
    """
    if comparison.task.name == "W1":
        amount, rates = bytes_per_token(dimensions) / 1e9, [m.read_gb_s for m in comparison.machine]
    elif comparison.task.name == "W4":
        amount, rates = operations_per_prompt_token(dimensions) / 1e9, [m.gflop_s for m in comparison.machine]
    else:
        return None
    around = zip(figures, rates, rates[1:], strict=False)
    return median([figure * amount / ((before + after) / 2) for figure, before, after in around])


def range_of(machines: Sequence[Machine]) -> tuple[float, float, float, float]:
    """Lowest and highest read bandwidth (GB/s), lowest and highest matrix rate (GFLOP/s)."""
    reads, products = [m.read_gb_s for m in machines], [m.gflop_s for m in machines]
    return min(reads), max(reads), min(products), max(products)
