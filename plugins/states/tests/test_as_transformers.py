"""The gated delta rule beside transformers' own."""

from __future__ import annotations

import pytest
import torch

from engine_states.ops_states.body import StateOpsBody

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
from engine_sdk.conformance.ops.states import PagesOfStates, StatesCase

KEY_HEADS, HEADS, KEY, VALUE, TOKENS = 2, 6, 5, 4, 100


@pytest.mark.slow  # imports it; the models of engine-models are held against it whole
def test_gated_delta() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    torch.manual_seed(0)
    q, k, v = (
        torch.randn(TOKENS, KEY_HEADS, KEY),
        torch.randn(TOKENS, KEY_HEADS, KEY),
        torch.randn(TOKENS, HEADS, VALUE),
    )
    dt, beta, a, dt_bias = (
        torch.randn(TOKENS, HEADS),
        torch.randn(TOKENS, HEADS),
        -torch.rand(HEADS),
        torch.randn(HEADS),
    )
    fades = torch.nn.functional.softplus(dt + dt_bias) * a
    expected, last = theirs.torch_chunk_gated_delta_rule(
        *(x[None] for x in (q, k, v, fades, beta.sigmoid())),
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    site = PagesOfStates(torch.zeros(1, HEADS, KEY, VALUE), StatesCase([TOKENS], [[TOKENS - 1]]))
    found = StateOpsBody(None).gated_delta(q, k, v, dt, a, dt_bias, beta, site, "state")  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(site.left(), last, rtol=1e-4, atol=1e-5)
