"""Endless requests for an engine core without a model: mixed lengths, shared beginnings, and some that are aborted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.types.params import SamplingParams
from engine.types.request import EngineRequest

LONGEST_PROMPT, LONGEST_OUTPUT = 256 + 64, 128
_PREFIXES = 64
_TOKENS = 1 << 20
_SHARED = 0.75
_LONG = 0.05
_ABORTED = 0.05


class Ask(NamedTuple):
    """A request, and what is to come of it.

    Args:
        output_len: tokens that it generates where nobody aborts it.
        abort_after: steps after which it is aborted, if it has not ended by then; None for never.
    """

    request: EngineRequest
    output_len: int
    abort_after: int | None


class RequestSource:
    """Draws requests one after the other; equal seeds draw equal requests.

    Three of four begin with one of 64 shared prefixes of 16 .. 256 tokens, asked for in proportion to 1 / k (Zipf), and
    go on with 1 .. 64 tokens of their own; 1 .. 24 tokens are generated, for one of 20 up to 128. One of 20 is aborted,
    within 24 steps.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        # Prompts are cut from one long row of ids: drawing each by itself would cost more than serving it.
        self._tokens: list[int] = self._random.integers(0, vocabulary, _TOKENS).tolist()
        lengths = self._random.integers(1, 16, _PREFIXES, endpoint=True) * 16
        self._prefixes = [self._random.integers(0, vocabulary, n).tolist() for n in lengths.tolist()]
        weights = 1 / np.arange(1, _PREFIXES + 1)
        self._weights = weights / weights.sum()
        self._params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in range(LONGEST_OUTPUT + 1) if n]
        self._drawn = 0

    def draw(self, count: int) -> list[Ask]:
        """The next `count` requests."""
        random = self._random
        shared, long, aborted = (random.random(count) < share for share in (_SHARED, _LONG, _ABORTED))
        prefixes = random.choice(_PREFIXES, count, p=self._weights)
        own = random.integers(1, 64, count, endpoint=True)
        first = random.integers(0, _TOKENS - 64, count)
        outputs = np.where(long, random.integers(1, LONGEST_OUTPUT, count, endpoint=True), 0)
        outputs = np.maximum(outputs, random.integers(1, 24, count, endpoint=True))
        steps = np.where(aborted, random.integers(0, 24, count), -1)
        columns = (shared, prefixes, own, first, outputs, steps)
        asks = []
        for with_prefix, prefix, n, start, output_len, step in zip(*(c.tolist() for c in columns), strict=True):
            self._drawn += 1
            prompt = self._tokens[start : start + n]
            request = EngineRequest(
                request_id=str(self._drawn),
                prompt_token_ids=self._prefixes[prefix] + prompt if with_prefix else prompt,
                params=self._params[output_len - 1],
            )
            asks.append(Ask(request, output_len, step if step >= 0 else None))
        return asks
