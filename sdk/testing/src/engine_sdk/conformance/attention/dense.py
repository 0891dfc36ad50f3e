"""Attention as its definition has it: dense, row by row, in float64. The oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class DenseResult(NamedTuple):
    """out [n, Hq, D] and lse [n, Hq]: the natural logarithm of the sum of exponentials of the scores."""

    out: np.ndarray
    lse: np.ndarray


class Extras(NamedTuple):
    """What scores may have beyond their scale.

    Args:
        soft_cap: scores become soft_cap * tanh(scores / soft_cap).
        slopes: float64 [Hq]; slope * distance is taken away from a score, after the cap.
        sinks: float64 [Hq]; one more score for each head, of a key whose value is 0.
    """

    soft_cap: float | None = None
    slopes: np.ndarray | None = None
    sinks: np.ndarray | None = None


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, places: np.ndarray, seen: np.ndarray, scale: float, extras: Extras
) -> DenseResult:
    """One row.

    Args:
        q: float64 [n, Hq, D].
        k, v: float64 [S, Hkv, D]; what no query sees may be NaN.
        places: int [n]; of each query among the keys.
        seen: bool [n, S].
    """
    used: np.ndarray = np.asarray(seen.any(axis=0))
    k, v = (np.where(used[:, None, None], x, 0).repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("nhd,shd->nhs", q, k) * scale
    if extras.soft_cap is not None:
        scores = extras.soft_cap * np.tanh(scores / extras.soft_cap)
    if extras.slopes is not None:
        distance = np.abs(places[:, None] - np.arange(len(k)))
        scores = scores - extras.slopes[:, None] * distance[:, None]
    scores = np.where(seen[:, None], scores, -np.inf)
    if extras.sinks is not None:
        sink = np.broadcast_to(extras.sinks[:, None], (*scores.shape[:2], 1))
        scores, v = np.concatenate([scores, sink], axis=-1), np.concatenate([v, np.zeros_like(v[:1])])
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    blind = total == 0  # it sees nothing
    lse = np.where(blind, -np.inf, top + np.log(np.where(blind, 1, total)))
    return DenseResult(np.einsum("nhs,shd->nhd", weights / np.where(blind, 1, total), v), lse[..., 0])


def combined(parts: Sequence[DenseResult]) -> DenseResult:
    """The results over parts of the keys as one over all of them."""
    lse = np.logaddexp.reduce([part.lse for part in parts])
    return DenseResult(sum(np.exp(part.lse - lse)[..., None] * part.out for part in parts), lse)


def visible(kv_index: np.ndarray, num_keys: int, window: int | None) -> np.ndarray:
    """bool [n, num_keys]: which keys queries at kv_index [n] see; none where that is -1."""
    key, index = np.arange(num_keys), kv_index[:, None]
    seen: np.ndarray = np.less_equal(key, index)
    if window is not None:
        seen &= key > index - window
    return seen
