"""Attention `triton` through the suite of engine-sdk: interpreted on the processor, and on a GPU where there is one."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine_sdk.conformance import AttentionConformance, AttentionThorough


@pytest.mark.slow
class TestTritonInterpreted(AttentionConformance):
    """Minutes; `test_attention_triton.py` has the short form of it."""

    driver, stand_in = "triton", "interpreted"
    test_what_some_queries_do_not_see_in_fp8 = None  # the interpreter reads a NaN of 8 bits as a number


@pytest.mark.gpu
class TestTriton(AttentionConformance):
    driver, device = "triton", "cuda"


@pytest.mark.gpu
@pytest.mark.slow
class TestTritonThoroughly(AttentionThorough, AttentionConformance):
    driver, device = "triton", "cuda"
