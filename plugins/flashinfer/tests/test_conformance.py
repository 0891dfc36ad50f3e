"""Driver `flashinfer` through the suite of its point, over the double of its library."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

import flashinfer_cards

from engine_sdk.conformance import AttentionConformance


class OverDouble(AttentionConformance):
    """All arithmetic of ours is tried: plans by bounds, lengths, tables, windows, padding, sums."""

    @classmethod
    def figure(cls) -> str | None:
        return None


class TestFlashInfer(OverDouble):
    card = flashinfer_cards.DoubleFlashInfer
