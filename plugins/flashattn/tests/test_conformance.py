"""Driver `flash` through the suite of its point, over the doubles of its libraries."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import flash_cards

from engine_sdk.conformance import AttentionConformance


class OverDouble(AttentionConformance):
    """All arithmetic of ours is tried: pages, tables, windows, plans, padding, sums. The kernels are the double's."""

    @pytest.mark.slow
    @pytest.mark.parametrize("length", [700, 3000])
    def test_long_rows(self, length: int) -> None:
        super().test_long_rows(length)

    @classmethod
    def figure(cls) -> str | None:
        return None


class TestFlashAttention2(OverDouble):
    quick = r"^(?!test_(ragged_batches|what_some_queries))"  # the same arithmetic of ours as below
    card, options = flash_cards.Fa2, {"implementation": "fa2"}


class TestFlashAttention3(OverDouble):
    card, options = flash_cards.Fa3, {"implementation": "fa3"}


@pytest.mark.slow
class TestFlashAttention4(OverDouble):
    card, options = flash_cards.Fa4, {"implementation": "fa4"}


@pytest.mark.slow
class TestTorch(OverDouble):
    card, options = flash_cards.Torch, {"implementation": "torch"}


@pytest.mark.slow
class TestKernels(OverDouble):
    """With writes by the kernel, interpreted."""

    card, options = flash_cards.Kernels, {"implementation": "fa3"}
