"""The sizes of a gated delta net, and what it keeps for a sequence: what a card needs to know of it."""

from __future__ import annotations

from typing import NamedTuple

from engine.types.model import KVSpec, StateTensor


class DeltaForm(NamedTuple):
    """Sizes of a mixer.

    Args:
        hidden_size: of what it reads and gives.
        key_heads, key_size: heads of queries and of keys.
        value_heads, value_size: as many for each key head.
        kernel: tokens that the convolution sees.
        eps: of the norm behind.
    """

    hidden_size: int
    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    kernel: int
    eps: float

    @property
    def channels(self) -> tuple[int, int, int]:
        """That go through the convolution: queries', keys', values'."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size

    @property
    def spec(self) -> KVSpec:
        """What a layer keeps: of the convolution what it read last, of the rule a matrix for each value head."""
        heads = (self.value_heads, self.key_size, self.value_size)
        states = (
            StateTensor(name="conv", shape=(self.kernel - 1, sum(self.channels)), dtype="model", divided_dim=1),
            StateTensor(name="delta", shape=heads, dtype="wide", divided_dim=0),
        )
        return KVSpec(kind="state", num_kv_heads=0, head_size=0, states=states)
