"""What is asked of the engine: seeded prompts with seeded lengths, and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from engine.types.errors import ConfigError


@dataclass(frozen=True)
class Lengths:
    """A range of lengths in tokens, both ends included, drawn uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Self:
        """Read "64" or "32:256". Raises ConfigError naming the flag."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{flag} {text}", "that is no length", "write one number, or a range LOW:HIGH from 1")
        return lengths

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class Ask(NamedTuple):
    """One request: its prompt's token ids, and how many tokens it generates (end of sequence is ignored)."""

    prompt: list[int]
    output_len: int


def draw_asks(count: int, inputs: Lengths, outputs: Lengths, ids: tuple[int, int], seed: int) -> list[Ask]:
    """`count` requests with uniform lengths and uniform token ids, the same for the same arguments.

    Prompts have nothing in common but by chance, so that the prefix cache finds nothing in them.

    Args:
        ids: first id, and one more than the last.
        seed: of all draws.
    """
    random = np.random.default_rng(seed)
    input_lens = random.integers(inputs.low, inputs.high, count, endpoint=True).tolist()
    output_lens = random.integers(outputs.low, outputs.high, count, endpoint=True).tolist()
    return [
        Ask(random.integers(*ids, n).tolist(), output_len)
        for n, output_len in zip(input_lens, output_lens, strict=True)
    ]


def draw_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When requests arrive, in seconds from the start, ascending; the first arrives at 0.

    The times between arrivals are drawn from a gamma distribution with shape `burstiness` and mean 1 / `rate`: 1 is a
    Poisson process, below 1 arrivals come in bursts, above 1 they come more evenly (vLLM's parameter of that name).

    Args:
        rate: requests per second; infinity lets all arrive at once.
        burstiness: > 0.
    """
    if rate == float("inf"):
        return [0.0] * count
    random = np.random.default_rng(seed)
    gaps = random.gamma(burstiness, 1 / (rate * burstiness), max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]
