"""Driver `flash` through the suite of its point: over the doubles of its libraries, and over the libraries on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import flash_cards

from engine_sdk.conformance import AttentionConformance
from engine_sdk.conformance.attention.case import Case, Form, Rows


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
