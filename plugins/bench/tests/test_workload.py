"""Seeded lengths and arrivals, by their distributions."""

from __future__ import annotations

import numpy as np
import pytest

from engine.types.errors import ConfigError
from engine_bench.workload import Lengths, draw_arrivals, draw_asks

N = 20_000


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_times_between_arrivals_are_gamma(burstiness):
    """Mean 1 / rate; squared coefficient of variation 1 / shape; and, for Poisson, the exponential's quantiles."""
    gaps = np.diff(draw_arrivals(N, 8.0, burstiness, seed=3))
    assert (gaps >= 0).all() and gaps.size == N - 1
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1)
    if burstiness == 1.0:
        quantiles = np.array([0.1, 0.5, 0.9])
        assert np.quantile(gaps, quantiles) == pytest.approx(-np.log1p(-quantiles) / 8, rel=0.06)


def test_the_first_comes_at_once_and_a_seed_repeats():
    assert draw_arrivals(5, 2.0, 1.0, seed=1) == draw_arrivals(5, 2.0, 1.0, seed=1)
    assert draw_arrivals(5, 2.0, 1.0, seed=1) != draw_arrivals(5, 2.0, 1.0, seed=2)
    assert draw_arrivals(5, 2.0, 1.0, seed=1)[0] == 0.0
    assert draw_arrivals(1, 2.0, 1.0, seed=1) == [0.0] and draw_arrivals(0, 2.0, 1.0, seed=1) == []


def test_infinite_rate_is_all_at_once():
    assert draw_arrivals(3, float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_lengths_are_uniform_over_both_ends():
    asks = draw_asks(4000, Lengths(3, 6), Lengths(1, 2), (10, 20), seed=5)
    lengths = np.bincount([len(ask.prompt) for ask in asks], minlength=8)
    assert lengths[:3].sum() == lengths[7:].sum() == 0
    assert lengths[3:7] == pytest.approx(1000, rel=0.15)
    assert {ask.output_len for ask in asks} == {1, 2}
    assert {token for ask in asks for token in ask.prompt} == set(range(10, 20))
    assert asks == draw_asks(4000, Lengths(3, 6), Lengths(1, 2), (10, 20), seed=5)


def test_lengths_are_read_as_written():
    assert Lengths.parse("64", "--input-len") == Lengths(64, 64)
    assert Lengths.parse("32:256", "--input-len") == Lengths(32, 256)
    assert (str(Lengths(64, 64)), str(Lengths(32, 256))) == ("64", "32:256")


@pytest.mark.parametrize("text", ["0", "9:3", "x", "3:", "-1", "1:2:3", ""])
def test_lengths_that_are_none(text):
    with pytest.raises(ConfigError, match="--input-len"):
        Lengths.parse(text, "--input-len")
