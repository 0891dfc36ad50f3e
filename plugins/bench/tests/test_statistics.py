"""Percentiles against numpy, goodput against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bench.statistics import is_good, median, percentile, spread, summary

TIMES = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=60)


@given(TIMES, st.floats(0, 100))
def test_percentiles_are_numpys(values, q):
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-9)


def test_there_is_no_percentile_of_nothing():
    with pytest.raises(ValueError):
        percentile([], 50)


@given(TIMES)
def test_a_summary_is_in_its_unit_and_in_order(values):
    figures = summary("ttft_ms", values, (10, 50, 90), 1e3)
    assert list(figures) == ["ttft_ms_p10", "ttft_ms_p50", "ttft_ms_p90"]
    assert figures["ttft_ms_p50"] == pytest.approx(float(np.median(values)) * 1e3)
    assert list(figures.values()) == sorted(figures.values())
    assert median(values) * 1e3 == figures["ttft_ms_p50"]


def test_nothing_measured_gives_no_figures():
    assert summary("ttft_ms", [], (50,)) == {}


def test_spread_is_a_share_of_the_larger():
    assert spread(80, 100) == spread(100, 80) == pytest.approx(0.2)
    assert spread(0, 0) == 0


@given(st.floats(0.001, 1), st.lists(st.floats(0.001, 1), max_size=20), st.floats(0.001, 1), st.floats(0.001, 1))
def test_goodput_is_ttft_and_mean_gap(ttft, gaps, slo_ttft, slo_itl):
    mean = math.fsum(gaps) / len(gaps) if gaps else 0.0
    assert is_good(ttft, gaps, slo_ttft, slo_itl) == (ttft <= slo_ttft and mean <= slo_itl)
    assert is_good(ttft, gaps, None, slo_itl) == (mean <= slo_itl)
    assert is_good(ttft, gaps, slo_ttft, None) == (ttft <= slo_ttft)
    assert is_good(ttft, gaps, None, None)
