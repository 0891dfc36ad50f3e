"""What becomes of drafts: how many tokens a row gives, and rejection sampling against the target's distribution."""

from __future__ import annotations

import math

import definition
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling_ops import rows_of

from engine.interfaces import ops as ops_interface
from engine_kit.philox import uniform
from engine_reference.ops_torch import common
from engine_reference.ops_torch.ops import TorchOpsBody

OPS = TorchOpsBody(None)  # type: ignore[arg-type]
VOCAB = 11


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_row_gives_its_tokens_up_to_the_first_that_is_no_draft(rows: list[list[tuple[int, int]]]) -> None:
    """rows: (drawn, draft) at each position but the last, which has no draft."""
    tokens = [token for row in rows for token in [*(drawn for drawn, _ in row), 1]]
    drafts = [draft for row in rows for draft in [*(draft for _, draft in row), -1]]
    start = np.cumsum([0, *(len(row) + 1 for row in rows)])
    expected = []
    for row in rows:
        same = 0
        while same < len(row) and row[same][0] == row[same][1]:
            same += 1
        expected.append(same + 1)
    counts = OPS.verify(
        torch.tensor(tokens, dtype=torch.int32), torch.tensor(drafts, dtype=torch.int32), torch.from_numpy(start)
    )
    assert counts.dtype == torch.int32 and counts.tolist() == expected


def chi_square_tail(observed: np.ndarray, expected: np.ndarray) -> float:
    """The probability of a larger statistic (Wilson and Hilferty 1931). Cells without expectation must be empty."""
    assert observed[expected == 0].sum() == 0
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, df = float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (0.6, 6, 0.9, 0.0), (1.7, 0, 1.0, 0.1)])
def test_tokens_have_the_targets_distribution(setting: tuple[float, int, float, float], one_hot: bool) -> None:
    n, rng = 60_000, np.random.default_rng(1)
    logits = rng.normal(size=VOCAB) * 1.2
    q = np.exp(rng.normal(size=VOCAB))
    q /= q.sum()
    if one_hot:
        drafts, probs = np.full(n, int(np.argsort(logits)[-2])), None
    else:
        drafts, probs = rng.choice(VOCAB, n, p=q), torch.from_numpy(np.tile(q, (n, 1)))
    rows = rows_of([setting] * n, list(range(n)), [7] * n)
    batch = torch.from_numpy(np.tile(logits, (n, 1)))
    tokens = OPS.reject(batch, rows, torch.from_numpy(drafts.astype(np.int32)), probs)
    assert tokens.dtype == torch.int32
    p = definition.distribution(logits, *setting)
    assert chi_square_tail(np.bincount(tokens.numpy(), minlength=VOCAB), n * p) > 1e-3
    kept = float((tokens.numpy() == drafts).mean())
    expected = p[drafts[0]] if one_hot else np.minimum(p, q).sum()
    assert abs(kept - expected) < 5 * math.sqrt(expected * (1 - expected) / n)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("one_hot", [True, False])
def test_reject_equals_its_definition(one_hot: bool, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "may_ask", lambda tensor: asks)
    """Row by row in numpy, with the random numbers that the interface names; greedy rows and rows without a draft
    give what `sample` gives."""
    n, rng = 400, np.random.default_rng(2)
    logits = rng.normal(size=(n, VOCAB)) * 1.5
    settings_ = [[(0.0, 0, 1.0, 0.0), (0.8, 5, 0.95, 0.02)][i % 3 > 0] for i in range(n)]
    drafts = rng.integers(-1, VOCAB, n).astype(np.int32)
    q = np.exp(rng.normal(size=(n, VOCAB)))
    q /= q.sum(axis=1, keepdims=True)
    rows = rows_of(settings_, list(range(n)), list(range(n)))
    probs = None if one_hot else torch.from_numpy(q)
    found = OPS.reject(torch.from_numpy(logits), rows, torch.from_numpy(drafts), probs).tolist()
    for i in range(n):
        if settings_[i][0] == 0 or drafts[i] < 0:
            assert found[i] == definition.sample(logits[i], *settings_[i], i, i)
            continue
        p, of_draft = definition.distribution(logits[i], *settings_[i]), q[i]
        if one_hot:
            of_draft = np.eye(VOCAB)[drafts[i]]
        u, v = (
            uniform(np.array([i]), np.array([i]), purpose)[0]
            for purpose in (ops_interface.PURPOSE_ACCEPT, ops_interface.PURPOSE_RESIDUAL)
        )
        if u * of_draft[drafts[i]] < p[drafts[i]]:
            assert found[i] == drafts[i]
        else:
            running = np.cumsum(np.maximum(p - of_draft, 0))
            assert found[i] == int(np.argmax(running > v * running[-1])) != drafts[i]


def test_the_purposes_differ() -> None:
    purposes = [value for name, value in vars(ops_interface).items() if name.startswith("PURPOSE_")]
    assert len(set(purposes)) == len(purposes) >= 3
