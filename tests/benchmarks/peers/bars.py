"""The bars that the comparison is held to, as ratios to a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.benchmarks.peers.protocol import GGUF
from tests.benchmarks.peers.results import START, Results

BEST = "the best peer"


class Bar(NamedTuple):
    """At least `factor` times as good as `peer`."""

    model: str
    task: str
    peer: str
    factor: float


BARS = (
    Bar("0.6B", "W1", BEST, 1.0),
    Bar("1B", "W1", BEST, 1.0),
    Bar("10M", "W1", "vllm", 4.0),
    Bar("10M", "W1", "llama.cpp", 0.8),
    Bar("0.6B", "W1-int8", "llama.cpp", 1.0),
    Bar("0.6B", "W1-int4", "llama.cpp", 1.0),
    Bar("0.6B", "W1-draft", "llama.cpp", 1.0),
    Bar("1B", "W1-int8", "llama.cpp", 1.0),
    Bar("1B", "W1-int4", "llama.cpp", 1.0),
    *(
        Bar(model, f"{work}-{form}", "llama.cpp", factor)
        for model in ("0.6B", "1B")
        for form in GGUF
        for work, factor in (("W1", 1.0), ("W5", 1.5), ("W4", 1.2))
    ),
    Bar("0.6B", "W2", BEST, 1.4),
    Bar("0.6B", "W3", BEST, 1.3),
    Bar("0.6B", "W4", BEST, 1.1),
    Bar("1B-A0.3B", "W1", "llama.cpp", 1.0),
    Bar("1B-A0.3B", "W5", "llama.cpp", 1.4),
    Bar("0.6B", START, "vllm", 10.0),
)


class Verdict(NamedTuple):
    """A bar with what was measured.

    Args:
        against: the peer that counts: the one named, or the best of those measured; "" where none was.
        ratio: how many times better ours was; None where nothing was measured.
    """

    bar: Bar
    against: str
    ratio: float | None

    @property
    def met(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.ratio is None else self.ratio >= self.bar.factor


def verdicts(results: Results) -> list[Verdict]:
    """Of every bar. The best peer is the one with the lowest ratio: whom ours is least ahead of."""
    found = []
    for bar in BARS:
        read: Callable[[Results, Bar], dict[str, float]] = _starts if bar.task == START else _works
        ratios = read(results, bar)
        if bar.peer != BEST:
            ratios = {name: ratio for name, ratio in ratios.items() if name == bar.peer}
        against = min(ratios, key=lambda name: ratios[name], default="")
        found.append(Verdict(bar, against, ratios.get(against)))
    return found


def _works(results: Results, bar: Bar) -> dict[str, float]:
    """The ratio of each peer."""
    return {c.peer: c.ratio for c in results.comparisons if c.model == bar.model and c.task.name == bar.task}


def _starts(results: Results, bar: Bar) -> dict[str, float]:
    """The first starts of each peer over ours beside it."""
    starts = [s for s in results.starts if s.model == bar.model and s.weights == "bf16"]
    ours = {s.peer: s.seconds[0] for s in starts if s.engine != s.peer}
    return {s.peer: s.seconds[0] / ours[s.peer] for s in starts if s.engine == s.peer and s.peer in ours}
