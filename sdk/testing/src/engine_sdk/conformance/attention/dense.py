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
        biases: float64 [Hq, 2 D + 1]; biases[:, D + d] is added, where d, within -D .. D, is how far the key is ahead.
    """

    soft_cap: float | None = None
    slopes: np.ndarray | None = None
    sinks: np.ndarray | None = None
    biases: np.ndarray | None = None


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, ahead: np.ndarray, seen: np.ndarray, scale: float, extras: Extras
) -> DenseResult:
    """One row.

    Args:
        q: float64 [n, Hq, D].
        k, v: float64 [S, Hkv, D]; what no query sees may be NaN.
        ahead: int [n, S]; how many places each key stands ahead of each query.
        seen: bool [n, S].
    """
    used: np.ndarray = np.asarray(seen.any(axis=0))
    k, v = (np.where(used[:, None, None], x, 0).repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("nhd,shd->nhs", q, k) * scale
    if extras.soft_cap is not None:
        scores = extras.soft_cap * np.tanh(scores / extras.soft_cap)
    if extras.slopes is not None:
        scores = scores - extras.slopes[:, None] * np.abs(ahead)[:, None]
    if extras.biases is not None:
        span = extras.biases.shape[1] // 2
        scores = scores + extras.biases[:, ahead.clip(-span, span) + span].transpose(1, 0, 2)
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


class Tree(NamedTuple):
    """Drafts that branch: a row's last tokens, the first of which all others follow.

    Args:
        parents: int [k]; which of them, counted from the first, each of the others follows.
    """

    parents: Sequence[int]

    @property
    def follows(self) -> np.ndarray:
        """bool [k + 1, k + 1]; whether one follows another, or is it."""
        found = np.eye(len(self.parents) + 1, dtype=bool)
        for node, parent in enumerate(self.parents, 1):
            found[node] |= found[parent]
        return found

    @property
    def hidden(self) -> list[int]:
        """The bits of each: see `engine.interfaces.attention.AttentionBatch.hidden`."""
        follows, found = self.follows, []
        for node in range(len(follows)):
            bits = sum(1 << (node - other) for other in range(1, node) if not follows[node, other])
            found.append(bits - (1 << 64) if bits >> 63 else bits)
        return found

    @property
    def depths(self) -> np.ndarray:
        """int [k + 1]; how many tokens each follows of these."""
        depths: np.ndarray = self.follows.sum(axis=1) - 1
        return depths
