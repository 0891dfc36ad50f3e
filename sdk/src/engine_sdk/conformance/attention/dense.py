"""Attention as its definition has it: dense, row by row, in float64. The oracle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class DenseResult(NamedTuple):
    """out [n, Hq, D] and lse [n, Hq]: the natural logarithm of the sum of exponentials of the scores."""

    out: np.ndarray
    lse: np.ndarray


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float, soft_cap: float | None
) -> DenseResult:
    """One row.

    Args:
        q: float64 [n, Hq, D].
        k, v: float64 [S, Hkv, D]; what no query sees may be NaN.
        seen: bool [n, S].
    """
    used: np.ndarray = np.asarray(seen.any(axis=0))
    k, v = (np.where(used[:, None, None], x, 0).repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("nhd,shd->nhs", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return DenseResult(np.einsum("nhs,shd->nhd", weights / total, v), (top + np.log(total))[..., 0])


def visible(kv_index: np.ndarray, num_keys: int, window: int | None) -> np.ndarray:
    """bool [n, num_keys]: which keys queries at kv_index [n] see; all of them where kv_index is negative."""
    key, index = np.arange(num_keys), kv_index[:, None]
    seen: np.ndarray = np.less_equal(key, index)
    if window is not None:
        seen &= key > index - window
    everything: np.ndarray = np.logical_or(seen, index < 0)
    return everything
