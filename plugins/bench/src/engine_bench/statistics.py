"""The statistics of measured times, and what counts as good."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, 0 <= q <= 100, by linear interpolation between the two nearest values (numpy's "linear").

    Raises ValueError where there are no values.
    """
    if not values:
        raise ValueError("there is no percentile of nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(values, 50)


def summary(name: str, values: Iterable[float], quantiles: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Percentiles as figures: {"<name>_p50": ..., "<name>_p90": ...}. Empty where there are no values.

    Args:
        name: of the figure, with its unit, e.g. "ttft_ms".
        values: measured.
        quantiles: in percent.
        scale: multiplies each value: 1000 makes milliseconds of seconds.
    """
    kept = list(values)
    return {f"{name}_p{q:g}": percentile(kept, q) * scale for q in quantiles} if kept else {}


def spread(before: float, after: float) -> float:
    """How far two measurements of one thing lie apart, as a share of the larger: 0 is equal, 0.2 is 20 %."""
    return abs(before - after) / max(before, after) if max(before, after) > 0 else 0.0


def is_good(ttft: float, gaps: Sequence[float], slo_ttft: float | None, slo_itl: float | None) -> bool:
    """Whether a completed request kept its objectives: the time to its first token is at most `slo_ttft`, and the mean
    of its gaps between tokens at most `slo_itl` (both as DistServe, OSDI 2024, defines goodput). None sets no limit;
    a request of one token has no gaps.
    """
    if slo_ttft is not None and ttft > slo_ttft:
        return False
    return slo_itl is None or not gaps or math.fsum(gaps) / len(gaps) <= slo_itl
