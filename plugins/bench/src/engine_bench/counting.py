"""How much a step has to read and to compute, from what the model is. See docs/benchmarks/method.md.

Counted is what no implementation can do without: every weight that a step multiplies with is read once a step, and
every cached key and value that a step's queries see is read once a step. What is left out: activations, the cache's
writes, logits, the few rows that an input embedding gives, norms and biases' arithmetic, and the softmax. So a figure
says how near a run came to what the machine allows, not how busy its memory was.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.types.model import KVSpec, ModelDescription
from engine.types.start import WorkerReady

ITEM_SIZES = {"float8_e4m3fn": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Work:
    """Bytes read, and floating-point operations (a multiplication with its addition is two)."""

    read_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.read_bytes + other.read_bytes, self.flops + other.flops)


class Counter:
    """Counts the work of one model.

    Args:
        model: what it is.
        ready: what its worker answered: parameters and bytes.
        dtype: of the input embedding.
        own_head: the head has weights beside those of an embedding that it is tied to: it is quantised.
        cache_dtype: of the cache's elements; None: `dtype`.
    """

    def __init__(
        self,
        model: ModelDescription,
        ready: WorkerReady,
        dtype: str,
        own_head: bool = False,
        cache_dtype: str | None = None,
    ) -> None:
        self._model = model
        self._cached = ITEM_SIZES[cache_dtype or dtype]
        table = model.vocab_size * model.hidden_size
        tied = bool(model.config.get("tie_word_embeddings", False))
        # An input embedding of its own is not multiplied with: a step reads single rows of it.
        multiplied = ready.num_parameters - (0 if tied else table)
        self.step_bytes = float(ready.weight_bytes - (0 if tied and not own_head else table * ITEM_SIZES[dtype]))
        self._token_flops = 2.0 * (multiplied - table)
        self._logits_flops = 2.0 * table

    def steps(self, count: int) -> Work:
        """The weights, read once in each of `count` steps."""
        return Work(read_bytes=self.step_bytes * count)

    def chunk(self, start: int, size: int, sampled: int) -> Work:
        """`size` tokens of one request from position `start` in one step, whose queries see the cache up to
        themselves; `sampled` of them get logits. Without the weights' bytes."""
        read, attention = 0.0, 0.0
        for spec in self._model.kv_specs:
            first = 0 if spec.sliding_window is None else max(0, start - spec.sliding_window + 1)
            read += (start + size - first) * self._key_bytes(spec)
            attention += 4.0 * self._model.num_q_heads * spec.head_size * seen(start, size, spec.sliding_window)
        return Work(read, size * self._token_flops + sampled * self._logits_flops + attention)

    def decodes(self, start: int, count: int) -> Work:
        """`count` steps of one token each from position `start` on. Without the weights' bytes."""
        read, attention = 0.0, 0.0
        for spec in self._model.kv_specs:
            keys = seen(start, count, spec.sliding_window)
            read += keys * self._key_bytes(spec)
            attention += 4.0 * self._model.num_q_heads * spec.head_size * keys
        return Work(read, count * (self._token_flops + self._logits_flops) + attention)

    def _key_bytes(self, spec: KVSpec) -> int:
        return 2 * spec.num_kv_heads * spec.head_size * self._cached


def seen(start: int, size: int, window: int | None) -> int:
    """The sum over positions start .. start + size - 1 of the keys that each sees in one layer, itself included."""
    if window is None:
        return size * start + size * (size + 1) // 2
    growing = min(size, max(0, window - start))  # positions that still see everything before them
    return seen(start, growing, None) + (size - growing) * window
