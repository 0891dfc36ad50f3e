"""Driver `flash` through the suite of its point, over its libraries themselves: on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import flash_cards

from engine_sdk.conformance import AttentionConformance
from engine_sdk.conformance.attention.case import Case, Form, Rows


class InBfloat16:
    """What the suite asks in float32 is asked in bfloat16, which is what the libraries compute in."""

    @classmethod
    def case(cls, form: Form, rows: Rows, num_decodes: int, **how: Any) -> Case:
        if form.dtype not in ("bfloat16", "float16"):
            form = replace(form, dtype="bfloat16", kv_dtype=None)
        return super().case(form, rows, num_decodes, **how)  # type: ignore[misc, no-any-return]


@pytest.mark.gpu
class TestOnGpu(InBfloat16, AttentionConformance):
    driver, device = "flash", "cuda"


@pytest.mark.gpu
class TestFlashAttention2OnGpu(InBfloat16, AttentionConformance):
    card, options, device = flash_cards.Fa2OnGpu, {"implementation": "fa2"}, "cuda"


@pytest.mark.gpu
class TestFlashAttention3OnGpu(InBfloat16, AttentionConformance):
    card, options, device = flash_cards.Fa3OnGpu, {"implementation": "fa3"}, "cuda"


@pytest.mark.gpu
class TestFlashAttention4OnGpu(InBfloat16, AttentionConformance):
    card, options, device = flash_cards.Fa4OnGpu, {"implementation": "fa4"}, "cuda"


@pytest.mark.gpu
class TestTorchOnGpu(InBfloat16, AttentionConformance):
    card, options, device = flash_cards.TorchOnGpu, {"implementation": "torch"}, "cuda"
