"""What `engine.interfaces.ops` says of sampling, penalties and drafts, row by row in numpy and float64. The oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.interfaces.ops import PURPOSE_ACCEPT, PURPOSE_RESIDUAL, PURPOSE_SAMPLE, SamplingRows
from engine_kit.philox import uniform

SLACK = {"float32": 1e-5, "float64": 1e-12}
"""How far rounding of logits of a dtype may move a running sum of probabilities."""


class Setting(NamedTuple):
    """One row's sampling parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def rows_of(settings: Sequence[Setting], seeds: Sequence[int], positions: Sequence[int], device: str) -> SamplingRows:
    """The settings as device tensors."""
    columns = list(zip(*settings, strict=True))
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    tensors = [torch.tensor(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)]
    bits = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64))
    made = [*tensors, bits, torch.tensor(positions, dtype=torch.int64)]
    return SamplingRows(*(tensor.to(device) for tensor in made))


def random_number(seed: int, position: int, purpose: int) -> float:
    """The published generator's number."""
    return float(uniform(np.array([seed], np.uint64), np.array([position]), purpose)[0])


def distribution(logits: np.ndarray, setting: Setting) -> np.ndarray:
    """float64 [V]: what a row of logits [V] with a temperature above 0 draws from."""
    logits = np.asarray(logits, np.float64)
    p = np.exp((logits - logits.max()) / np.float64(np.float32(setting.temperature)))
    p /= p.sum()
    kept = p >= np.float32(setting.min_p) * p.max()
    if 0 < setting.top_k < len(p):
        kept &= p >= np.sort(np.where(kept, p, 0))[::-1][setting.top_k - 1]
    p = np.where(kept, p, 0)
    if setting.top_p < 1:
        order = np.lexsort((np.arange(len(p)), -p))
        running = np.cumsum(p[order])
        goal = np.float64(np.float32(setting.top_p)) * p.sum()
        p[order[int(np.searchsorted(running, goal)) + 1 :]] = 0
    whole: np.ndarray = p / p.sum()
    return whole


def draw(weights: np.ndarray, u: float) -> int:
    """The first id at which the running sum exceeds u of the whole."""
    running = np.cumsum(weights)
    return int(np.argmax(running > u * running[-1]))


def sample(logits: np.ndarray, setting: Setting, seed: int, position: int, slack: float = 0.0) -> set[int]:
    """The tokens that a row may draw: the defined one, and those beside it that rounding of `slack` would give."""
    if setting.temperature == 0:
        return {int(np.argmax(logits))}
    u = random_number(seed, position, PURPOSE_SAMPLE)
    return {token for weights in _near(logits, setting, slack) for token in _drawn(weights, u, slack)}


def reject(
    logits: np.ndarray,
    setting: Setting,
    seed: int,
    position: int,
    draft: int,
    q: np.ndarray | None,
    slack: float = 0.0,
) -> set[int]:
    """What may become of a draft that was drawn from q [V]; None: q is 1 at the draft. `slack` as in `sample`."""
    if draft < 0 or setting.temperature == 0:
        return sample(logits, setting, seed, position, slack)
    found = set()
    for p in _near(logits, setting, slack):
        q = np.eye(len(p))[draft] if q is None else q
        wanted = random_number(seed, position, PURPOSE_ACCEPT) * q[draft]
        if wanted < p[draft] + slack:
            found.add(draft)
        if wanted >= p[draft] - slack:
            found |= _drawn(np.maximum(p - q, 0), random_number(seed, position, PURPOSE_RESIDUAL), slack)
    return found


def _near(logits: np.ndarray, setting: Setting, slack: float) -> list[np.ndarray]:
    """The distribution, and those that another rounding of the sum that reaches top_p would give."""
    shifts = (-slack, 0.0, slack) if setting.top_p < 1 and slack else (0.0,)
    return [distribution(logits, setting._replace(top_p=setting.top_p + shift)) for shift in shifts]


def _drawn(weights: np.ndarray, u: float, slack: float) -> set[int]:
    return {draw(weights, min(max(u + shift, 0.0), 1 - 1e-12)) for shift in (-slack, 0.0, slack)}


def penalise(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> np.ndarray:
    """One row of logits [V] after penalties."""
    found = np.array(logits, np.float64)
    for token in {*prompt, *output}:
        found[token] = found[token] / repetition if found[token] > 0 else found[token] * repetition
    for token in set(output):
        found[token] -= frequency * list(output).count(token) + presence
    return found
