"""A small generator of pairwise combinations: every pair of values of every two factors occurs in some row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that cover all pairs; deterministic, and near the fewest (greedy, in the manner of IPO, Lei and Tai 1998).

    Each row begins with the first pair not covered yet; every other factor takes the value that covers most of the
    pairs still open with the values already in the row, the first one among equals.
    """
    names = list(factors)
    indices = [range(len(factors[name])) for name in names]
    open_pairs = {
        (f, a, g, b): None for f, g in combinations(range(len(names)), 2) for a, b in product(indices[f], indices[g])
    }
    rows = []
    while open_pairs:
        f, a, g, b = next(iter(open_pairs))
        row = {f: a, g: b}
        for factor in range(len(names)):
            if factor not in row:
                gains = [
                    sum(_pair(factor, value, *other) in open_pairs for other in row.items())
                    for value in indices[factor]
                ]
                row[factor] = gains.index(max(gains))
        for one, two in combinations(sorted(row), 2):
            open_pairs.pop((one, row[one], two, row[two]), None)
        rows.append({name: factors[name][row[i]] for i, name in enumerate(names)})
    return rows


def _pair(f: int, a: int, g: int, b: int) -> tuple[int, int, int, int]:
    return (f, a, g, b) if f < g else (g, b, f, a)
