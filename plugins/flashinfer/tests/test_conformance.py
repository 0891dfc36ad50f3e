"""Driver `flashinfer` through the suite of its point: over the double of its library, and over FlashInfer on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

import flashinfer_cards

from engine_sdk.conformance import AttentionConformance
from engine_sdk.conformance.attention.case import Case, Form, Rows


class OverDouble(AttentionConformance):
    """All arithmetic of ours is tried: plans by bounds, lengths, tables, windows, padding, sums."""

    @classmethod
    def figure(cls) -> str | None:
        return None


class TestFlashInfer(OverDouble):
    card = flashinfer_cards.DoubleFlashInfer


@pytest.mark.gpu
class TestOnGpu(AttentionConformance):
    """What the suite asks in float32 is asked in bfloat16, with heads of the nearest size that FlashInfer has."""

    driver, device = "flashinfer", "cuda"

    @classmethod
    def case(cls, form: Form, rows: Rows, num_decodes: int, **how: Any) -> Case:
        if form.dtype not in ("bfloat16", "float16"):
            kv_dtype = form.kv_dtype if form.kv_dtype == "float8_e4m3fn" else None
            form = replace(form, dtype="bfloat16", kv_dtype=kv_dtype)
        if form.head_size < 64:
            form = replace(form, head_size=64)
        return super().case(form, rows, num_decodes, **how)
