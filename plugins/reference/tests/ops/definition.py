"""The meaning of sampling and penalties, row by row in numpy: what `engine.interfaces.ops` says, and no faster."""

from __future__ import annotations

import numpy as np

from engine_kit.philox import uniform


def distribution(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The probabilities that a row of logits [V] draws from."""
    logits = np.asarray(logits, np.float64)
    x = (logits - logits.max()) / np.float64(np.float32(temperature))
    p = np.exp(x)
    p /= p.sum()
    kept = p >= np.float32(min_p) * p.max()
    if 0 < top_k < len(p):
        kept &= p >= np.sort(np.where(kept, p, 0))[::-1][top_k - 1]
    p = np.where(kept, p, 0)
    if top_p < 1:
        order = np.lexsort((np.arange(len(p)), -p))
        running = np.cumsum(p[order])
        goal = np.float64(np.float32(top_p)) * p.sum()
        p[order[int(np.searchsorted(running, goal)) + 1 :]] = 0
    return p / p.sum()


def sample(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """The token that one row draws."""
    if temperature == 0:
        return int(np.argmax(logits))
    running = np.cumsum(distribution(logits, temperature, top_k, top_p, min_p))
    u = uniform(np.array([seed], np.uint64), np.array([position]), 0)[0]
    return int(np.argmax(running > u * running[-1]))


def penalise(
    logits: np.ndarray, prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> np.ndarray:
    """One row of logits [V] after penalties."""
    logits = np.array(logits, np.float64)
    presence, frequency, repetition = float(presence), float(frequency), float(repetition)
    for token in {*prompt, *output}:
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(output):
        logits[token] -= frequency * output.count(token) + presence
    return logits
