"""Driver `flashinfer` through the suite of its point, over FlashInfer itself: on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import AttentionConformance
from engine_sdk.conformance.attention.case import Case, Form, Rows


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
