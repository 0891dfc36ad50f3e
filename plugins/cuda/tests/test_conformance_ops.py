"""The operations through the suite of engine-sdk: in Triton's interpreter, or on the GPU where there is one."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine_sdk.conformance import OpsConformance

from engine_cuda.interpreter import interpreted

QUICK = (
    r"card|known|captured|options|methods|verify|place_tokens|mask_tokens|apply_bitmask|penalties|prepare_inputs|"
    r"\[300-float32\]|test_logprobs\[5|check_logits|((embedding|gather|gelu|soft_cap|silu|norm|rope).*float32)|"
    r"test_add_rms_norm\[64-bfloat16|test_rope\[64-64-bfloat16"
)
"""Which tests run by default where kernels are interpreted; the others are slow then. See `conftest.py`."""


class TestOps(OpsConformance):
    driver = "triton"
    device = "cpu" if interpreted() else "cuda"
    draws = 300 if interpreted() else 20_000
