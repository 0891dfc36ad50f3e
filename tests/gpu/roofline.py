"""The least time that a step can take: the sum over its operations of what each is bound by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

ITEM = 2
"""Bytes of an element in bfloat16."""


class Operation(NamedTuple):
    """One operation of a step, all layers' together: bytes that it must move, and floating-point operations."""

    name: str
    num_bytes: float
    flops: float

    def seconds(self, gb_s: float, tflop_s: float) -> float:
        """The longer of moving and computing."""
        return max(self.num_bytes / (gb_s * 1e9), self.flops / (tflop_s * 1e12))


def decode_operations(config: Mapping[str, Any], rows: int, context: float) -> list[Operation]:
    """One decode step of a Llama or Qwen3 in bfloat16, with so many rows that each see `context` keys, their own
    included.

    Counted are a matrix product's weights, inputs and outputs, and the cache as it is read and written. What lies
    between (norms, rotary positions, activations, sampling) could be part of these operations, so it takes no time.
    """
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q, kv = heads * size, kv_heads * size

    def product(name: str, inputs: int, outputs: int, times: int = layers) -> Operation:
        moved = inputs * outputs + rows * (inputs + outputs)
        return Operation(name, ITEM * moved * times, 2.0 * rows * inputs * outputs * times)

    cache = rows * (context + 1) * 2 * kv + rows * 2 * q  # read with the new keys written, queries in, outputs out
    return [
        product("qkv", hidden, q + 2 * kv),
        Operation("attention", ITEM * cache * layers, 4.0 * rows * context * q * layers),
        product("output", q, hidden),
        product("gate and up", hidden, 2 * inner),
        product("down", inner, hidden),
        product("head", hidden, config["vocab_size"], 1),
    ]


def least_seconds(operations: Iterable[Operation], gb_s: float, tflop_s: float) -> float:
    """Of a step made of these operations, one after the other."""
    return sum(operation.seconds(gb_s, tflop_s) for operation in operations)
