"""What a server's operator wants to know of its requests: counts and distributions, as plain numbers.

No metrics library is imported here: `engine_server.metrics.exposition` writes these numbers down when somebody asks.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter

import msgspec

from engine.embedding import RequestState, SequenceState
from engine.types.outputs import StepStats

# The bounds are vLLM's, so that its users' dashboards fit; those between tokens begin lower, for small models.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS = (1, 2, 5, 10, 20)


class Histogram(msgspec.Struct):
    """Counts of values by size. Not thread-safe.

    Args:
        bounds: ascending upper bounds; a value counts in the first that is not below it.
        counts: for each bound, and of what is above the last.
        sum: of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = []
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many values are not above it), the last bound being "+Inf": Prometheus' form."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self.counts), strict=True))


class Measured(msgspec.Struct):
    """What `Measures` has counted: its histograms by their names, and the rest. It travels between processes."""

    histograms: dict[str, Histogram] = {}
    finished: dict[str, int] = {}
    retries: int = 0
    warmed: dict[str, int] = {}

    def add(self, more: Measured) -> None:
        """Count what another has measured, too."""
        for name, histogram in more.histograms.items():
            mine = self.histograms.setdefault(name, Histogram(histogram.bounds))
            mine.counts = [a + b for a, b in zip(mine.counts, histogram.counts, strict=True)]
            mine.sum += histogram.sum
        for reason, count in more.finished.items():
            self.finished[reason] = self.finished.get(reason, 0) + count
        self.retries += more.retries
        for name, count in more.warmed.items():
            self.warmed[name] = self.warmed.get(name, 0) + count


class Measures:
    """The `RequestObserver` that counts. A sequence is one of a request's n.

    Args:
        max_model_len: bounds the buckets of token counts.

    Attributes:
        time_to_first_token: from arrival, tokenising included, until the first token is back in the frontend.
        inter_token_latency: between the tokens of a sequence.
        request_time_per_output_token: a sequence's mean of these.
        e2e_latency: from arrival to the end.
        queue_time, prefill_time: as the core measured them, see `CoreOutput`; of sequences that got a token.
        decode_time, inference_time: from the first token, or from admission, to the last token.
        step_tokens: computed in a step.
        prompt_tokens, generation_tokens: of sequences that ended.
        params_n: one value a request; `params_max_tokens`: one a sequence, where the request set it.
        finished: sequences that ended, by finish reason.
        retries: requests that were sent again because their engine core had died.
        warmed: sequences with `max_tokens` 0 that ended well ("requests"), and tokens of their prompts that were there
            or were loaded ("found") and that were not ("computed").
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = _one_two_five(max_model_len)
        self.time_to_first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS)
        self.request_time_per_output_token = Histogram(TOKEN_SECONDS)
        self.e2e_latency = Histogram(REQUEST_SECONDS)
        self.queue_time = Histogram(REQUEST_SECONDS)
        self.prefill_time = Histogram(REQUEST_SECONDS)
        self.decode_time = Histogram(REQUEST_SECONDS)
        self.inference_time = Histogram(REQUEST_SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.prompt_tokens = Histogram(tokens)
        self.generation_tokens = Histogram(tokens)
        self.params_n = Histogram(COMPLETIONS)
        self.params_max_tokens = Histogram(tokens)
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.retries = 0
        self.warmed: Counter[str] = Counter(requests=0, found=0, computed=0)

    def arrived(self, request: RequestState) -> None:
        self.params_n.observe(request.params.n)

    def stepped(self, stats: StepStats | None) -> None:
        if stats is not None and stats.num_tokens:
            self.step_tokens.observe(stats.num_tokens)

    def first_token(self, seconds: float) -> None:
        self.time_to_first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        self.inter_token_latency.observe(seconds, count)

    def retried(self) -> None:
        self.retries += 1

    def ended(self, request: RequestState, sequence: SequenceState, reason: str, now: float) -> None:
        self.finished[reason] += 1
        self.e2e_latency.observe(now - request.arrived)
        self.prompt_tokens.observe(len(request.prompt_token_ids))
        self.generation_tokens.observe(sequence.num_tokens)
        if request.params.max_tokens == 0 and reason == "length":
            found = sequence.num_cached_tokens
            self.warmed.update(requests=1, found=found, computed=len(request.prompt_token_ids) - found)
        if request.params.max_tokens is not None:
            self.params_max_tokens.observe(request.params.max_tokens)
        if sequence.num_tokens:
            decode = sequence.last_token - sequence.first_token
            self.queue_time.observe(sequence.queue_time)
            self.prefill_time.observe(sequence.prefill_time)
            self.decode_time.observe(decode)
            self.inference_time.observe(sequence.prefill_time + decode)
            if sequence.num_tokens > 1:
                self.request_time_per_output_token.observe(decode / (sequence.num_tokens - 1))

    def plain(self) -> Measured:
        """What was counted, as plain data."""
        histograms = {name: value for name, value in vars(self).items() if isinstance(value, Histogram)}
        return Measured(histograms, dict(self.finished), self.retries, dict(self.warmed))


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the first that is not below `most`."""
    bounds: list[float] = [1]
    while bounds[-1] < most:
        bounds.append((1, 2, 5)[len(bounds) % 3] * 10 ** (len(bounds) // 3))
    return tuple(bounds)
