"""The least time that a step can take: the sum over its operations of what each is bound by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

ITEM = 2
"""Bytes of an element in bfloat16."""
FP8_ITEM = 1
"""Of one in 8 bits."""
SCALE = 4
"""Bytes of a float32: each output of a product in fp8 has one, and each of its rows."""


class Limits(NamedTuple):
    """What a machine can do.

    Args:
        gb_s: 10^9 bytes a second of its memory.
        tflop_s, fp8_tflop_s: 10^12 operations a second of products of factors in bfloat16, and in 8 bits.
    """

    gb_s: float
    tflop_s: float
    fp8_tflop_s: float


class Operation(NamedTuple):
    """One operation of a step, all layers' together: bytes that it must move, and floating-point operations, of
    factors in bfloat16 or in 8 bits."""

    name: str
    num_bytes: float
    flops: float
    fp8: bool = False

    def seconds(self, limits: Limits) -> float:
        """The longer of moving and computing."""
        computed = limits.fp8_tflop_s if self.fp8 else limits.tflop_s
        return max(self.num_bytes / (limits.gb_s * 1e9), self.flops / (computed * 1e12))


class Bits(NamedTuple):
    """What of a model is kept in 8 bits: the layers' weights, whose inputs are rounded to as many; the head's; keys and
    values, which are multiplied in bfloat16 with queries that are."""

    linear: bool = False
    head: bool = False
    cache: bool = False


PLAIN = Bits()


def decode_operations(config: Mapping[str, Any], rows: int, context: float, fp8: Bits = PLAIN) -> list[Operation]:
    """One decode step of a Llama or Qwen3 in bfloat16, but for what `fp8` names, with so many rows that each see
    `context` keys, their own included.

    Counted are a matrix product's weights, inputs and outputs, and the cache as it is read and written. What lies
    between (norms, rotary positions, activations, sampling) could be part of these operations, so it takes no time.
    """
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q, kv = heads * size, kv_heads * size

    def product(name: str, inputs: int, outputs: int, times: int = layers, small: bool = fp8.linear) -> Operation:
        moved = (FP8_ITEM if small else ITEM) * (inputs * outputs + rows * inputs) + ITEM * rows * outputs
        moved += SCALE * (outputs + rows) if small else 0
        return Operation(name, moved * times, 2.0 * rows * inputs * outputs * times, small)

    cache = (FP8_ITEM if fp8.cache else ITEM) * rows * (context + 1) * 2 * kv  # read, and the new keys written
    cache += ITEM * rows * 2 * q  # queries in, outputs out
    return [
        product("qkv", hidden, q + 2 * kv),
        Operation("attention", cache * layers, 4.0 * rows * context * q * layers),
        product("output", q, hidden),
        product("gate and up", hidden, 2 * inner),
        product("down", inner, hidden),
        product("head", hidden, config["vocab_size"], 1, fp8.head),
    ]


def least_seconds(operations: Iterable[Operation], limits: Limits) -> float:
    """Of a step made of these operations, one after the other."""
    return sum(operation.seconds(limits) for operation in operations)
