"""The map of the KV cache against a slow count of the same pages."""

from __future__ import annotations

import numpy as np
import pytest

from engine_playground.page_cells import LEAST_DRAWN, summary


def slow_class(holders: int, cached: int) -> int:
    if holders == 0:
        return 1 if cached else 0
    return {1: 2, 2: 3, 3: 4, 4: 4}.get(holders, 5)


@pytest.mark.parametrize("pages", [1, 5, 511, 512, 513, 3000, 70_000])
@pytest.mark.parametrize("used", [0.0, 0.02, 0.4, 1.0])
@pytest.mark.parametrize("most", [64, 2048])
def test_counts_and_cells(pages: int, used: float, most: int) -> None:
    random = np.random.default_rng(pages)
    holders, cached = random.integers(0, 9, pages).astype(np.uint8), random.integers(0, 2, pages).astype(np.uint8)
    end = round(pages * used)
    holders[end:] = cached[end:] = 0
    told = summary(holders, cached, most)
    classes = [slow_class(h, c) for h, c in zip(holders.tolist(), cached.tolist(), strict=True)]
    assert told["total"] == pages
    assert told["counts"] == [classes.count(i) for i in range(6)]
    assert told["saved"] == sum(h - 1 for h in holders.tolist() if h)
    drawn, per_cell = told["drawn"], told["per_cell"]
    assert not any(classes[drawn:]) and drawn <= pages and len(told["cells"]) <= most
    assert drawn == pages or (drawn >= LEAST_DRAWN and drawn & (drawn - 1) == 0)
    assert per_cell == 1 or drawn > most
    cells = [max(classes[i : min(i + per_cell, drawn)]) for i in range(0, drawn, per_cell)]
    assert told["cells"] == "".join(map(str, cells))


def test_a_model_that_keeps_nothing() -> None:
    none = np.empty(0, np.uint8)
    assert summary(none, none, 64) == {
        "total": 0,
        "counts": [0] * 6,
        "drawn": 0,
        "per_cell": 1,
        "cells": "",
        "saved": 0,
    }
