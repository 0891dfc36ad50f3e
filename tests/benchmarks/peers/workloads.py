"""The work that every engine is given: seeded token ids, in calls of one batch each, and the figure that comes of it.

A measurement is a list of calls, made one after the other; all requests of a call are handed over at once. Each pair
has prompts of its own, so that what a prefix cache holds of the pair before helps nobody.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.benchmarks.peers.dimensions import Dimensions


class Request(NamedTuple):
    """Token ids in, and how many tokens have to come out; end of sequence is ignored, tokens are chosen greedily."""

    prompt: list[int]
    output_len: int


Call = list[Request]
MAX_MODEL_LEN = 2048
"""Every engine is started for contexts of this length."""
MAX_NUM_SEQS = 64
"""As many requests as W2 has: each engine may run all of them at once."""
KV_TOKENS = 32_768
"""Every engine is given cache for this many tokens: W2 needs some 27,000."""
FIRST_ID = 3
"""After the special tokens."""


@dataclass(frozen=True)
class Workload:
    """One kind of work.

    Args:
        name: as it is asked for.
        about: one line.
        unit: of the figure.
        more_is_better: False for seconds.
        calls: of one measurement, for a model and a random generator.
        figure: from the calls and the seconds that each took.
    """

    name: str
    about: str
    unit: str
    more_is_better: bool
    calls: Callable[[Dimensions, np.random.Generator], list[Call]]
    figure: Callable[[Sequence[Call], Sequence[float]], float]

    def draw(self, dimensions: Dimensions, seed: int) -> list[Call]:
        """The calls of one measurement: the same for the same model and seed."""
        return self.calls(dimensions, np.random.default_rng([seed, zlib.crc32(self.name.encode())]))

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better ours is: above 1, ours is ahead."""
        return ours / theirs if self.more_is_better else theirs / ours


def ids(dimensions: Dimensions, count: int, random: np.random.Generator) -> list[int]:
    """Uniform token ids."""
    return random.integers(FIRST_ID, dimensions.vocab_size, count).tolist()


def _one_stream(dimensions: Dimensions, random: np.random.Generator) -> list[Call]:
    calls: list[Call] = []
    for _ in range(dimensions.w1_repeats):
        calls += [[Request(ids(dimensions, 128, random), 1)], [Request(ids(dimensions, 128, random), 128)]]
    return calls


def _decode_rate(calls: Sequence[Call], seconds: Sequence[float]) -> float:
    """Tokens after the first, over the time of the long calls less that of the calls with one token alone: whatever
    an engine does before its first token is in both, so no engine has to tell when that came."""
    tokens = sum(request.output_len - 1 for call in calls for request in call)
    first = sum(time for call, time in zip(calls, seconds, strict=True) if call[0].output_len == 1)
    return tokens / (sum(seconds) - 2 * first)


def _offline(dimensions: Dimensions, random: np.random.Generator) -> list[Call]:
    lengths = zip(random.integers(32, 512, 64, endpoint=True), random.integers(32, 256, 64, endpoint=True), strict=True)
    return [[Request(ids(dimensions, int(n), random), int(output_len)) for n, output_len in lengths]]


def _output_rate(calls: Sequence[Call], seconds: Sequence[float]) -> float:
    return sum(request.output_len for call in calls for request in call) / sum(seconds)


def _shared_prefix(dimensions: Dimensions, random: np.random.Generator) -> list[Call]:
    prefix = ids(dimensions, 512, random)
    return [[Request(prefix + ids(dimensions, 32, random), 32) for _ in range(32)]]


def _streams(dimensions: Dimensions, random: np.random.Generator) -> list[Call]:
    return [
        [Request(ids(dimensions, 128, random), 1) for _ in range(16)],
        [Request(ids(dimensions, 128, random), 128) for _ in range(16)],
    ]


def _seconds(calls: Sequence[Call], seconds: Sequence[float]) -> float:
    return sum(seconds)


def _prompts(dimensions: Dimensions, random: np.random.Generator) -> list[Call]:
    return [[Request(ids(dimensions, 1024, random), 1) for _ in range(8)]]


def _short(dimensions: Dimensions, random: np.random.Generator) -> list[Call]:
    return [[Request(ids(dimensions, 64, random), 64) for _ in range(32)]]


def _prompt_rate(calls: Sequence[Call], seconds: Sequence[float]) -> float:
    return sum(len(request.prompt) for call in calls for request in call) / sum(seconds)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "one stream, 128 tokens in, 128 out: decoding", "tokens/s", True, _one_stream, _decode_rate),
        Workload("W2", "64 requests, 32..512 in, 32..256 out", "output tokens/s", True, _offline, _output_rate),
        Workload("W3", "32 requests with 512 shared and 32 own tokens, 32 out", "s", False, _shared_prefix, _seconds),
        Workload("W4", "8 prompts of 1,024 tokens, 1 out", "prompt tokens/s", True, _prompts, _prompt_rate),
        Workload("W5", "16 streams, 128 tokens in, 128 out: decoding", "tokens/s", True, _streams, _decode_rate),
        Workload("W6", "32 requests, 64 tokens in, 64 out", "output tokens/s", True, _short, _output_rate),
    )
}


def warm_up(dimensions: Dimensions) -> list[Call]:
    """One request alone (the first token of a start), then a few together; never measured."""
    random = np.random.default_rng(2**31)
    return [
        [Request(ids(dimensions, 128, random), 1)],
        [Request(ids(dimensions, 160, random), 8)],
        [Request(ids(dimensions, 40, random), 8) for _ in range(4)],
    ]
