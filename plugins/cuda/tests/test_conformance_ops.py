"""The operations through the suite of engine-sdk: in Triton's interpreter, and on a GPU where there is one."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine_sdk.conformance import OpsConformance


class TestOpsInterpreted(OpsConformance):
    driver, stand_in = "triton", "interpreted"
    draws = 200
    quick = (
        r"card|known|methods|verify|place_tokens|mask_tokens|apply_bitmask|penalties|prepare_inputs|check_logits|"
        r"sample_is_as_defined\[300-float32|test_draw\[1-|test_logprobs\[5|"
        r"((embedding|gather|gelu|soft_cap|silu|norm|rope).*float32)|"
        r"test_states\[(ssd|gated_delta|causal_conv)-(drafts|one row)-float32|"
        r"test_states\[selective_scan-decode-bfloat16|"
        r"test_routing_what|test_route\[(groups|sigmoid|jitter)-True|test_gate\[float32|test_experts\[6-8-True-float32|"
        r"test_add_rms_norm\[64-bfloat16|test_rope\[64-64-bfloat16|test_qk_norm_rope\[128-128-bfloat16"
    )


@pytest.mark.gpu
class TestOps(OpsConformance):
    driver, device = "triton", "cuda"
