"""Rows spread over experts without waiting for the device, beside those that are sorted with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_kit.by_expert import Spread, by_expert


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9), experts=st.integers(1, 6), top_k=st.integers(1, 4), here=st.floats(0, 1),
    aligned=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_spread_rows_give_what_sorted_ones_do(
    tokens: int, experts: int, top_k: int, here: float, aligned: int, seed: int
) -> None:
    """Each row once, whole blocks of one expert, and the same sums; nobody's rows hold no numbers."""
    random = torch.Generator().manual_seed(seed)
    k = min(top_k, experts)
    ids = torch.stack([torch.randperm(experts, generator=random)[:k] for _ in range(tokens)]).int()
    ids[torch.rand(ids.shape, generator=random) > here] = experts
    x = torch.randn(tokens, 3, generator=random, dtype=torch.float64)
    weights = torch.rand(tokens, k, generator=random, dtype=torch.float64)
    factors = torch.randn(experts, generator=random, dtype=torch.float64)
    found = Spread.of(ids, experts, aligned)
    assert len(found.token) % aligned == 0 and found.starts[-1] <= len(found.token)
    for block in found.expert.view(-1, aligned):
        assert len({int(one) for one in block if one >= 0}) <= 1
    for expert in range(experts):
        start, count = int(found.starts[expert]), int((ids == expert).sum())
        assert start % aligned == 0
        assert (found.expert == expert).nonzero().flatten().tolist() == list(range(start, start + count))
        assert (
            sorted(found.token[start : start + count].tolist()) == (ids == expert).any(1).nonzero().flatten().tolist()
        )
    y = x[found.token] * factors[found.expert.long()].unsqueeze(1)
    y[found.expert < 0] = float("nan")
    expected = by_expert(x, ids, weights, experts, lambda expert, rows: rows * factors[expert])
    assert torch.equal(found.summed(y, weights), expected)


@pytest.mark.parametrize("aligned", [1, 8])
def test_nobody_chosen_here(aligned: int) -> None:
    """A rank that has none of the chosen experts gives zeros."""
    found = Spread.of(torch.full((3, 2), 4, dtype=torch.int32), 4, aligned)
    assert (found.expert == -1).all()
    y = torch.full((len(found.token), 5), float("nan"))
    assert torch.equal(found.summed(y, torch.ones(3, 2)), torch.zeros(3, 5))
