"""The gated delta rule beside a loop over tokens in float64, and beside transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.interfaces.model import StateBatch
from engine_states.ops_states.body import StateOpsBody

OPS = StateOpsBody(None)  # type: ignore[arg-type]
KEY_HEADS, HEADS, KEY, VALUE = 2, 6, 5, 4
Inputs = tuple[torch.Tensor, ...]


def inputs(tokens: int, seed: int = 0) -> Inputs:
    """q, k, v, dt, a, dt_bias, beta."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(tokens, KEY_HEADS, KEY), normal(tokens, KEY_HEADS, KEY), normal(tokens, HEADS, VALUE)
    return q, k, v, normal(tokens, HEADS), -normal(HEADS).exp() / 3, normal(HEADS), normal(tokens, HEADS)


def fades(dt: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    return (1 + (dt + dt_bias).exp()).log() * a


def batch(lengths: list[int], write_at: list[int]) -> StateBatch:
    loc, at = np.cumsum([0, *lengths]).astype(np.int32), np.array(write_at, np.int64)
    empty = torch.empty(0, dtype=torch.int64)
    return StateBatch(
        query_start_loc=torch.from_numpy(loc), query_start_loc_host=loc, read=empty, write=empty,
        write_at=torch.from_numpy(at), write_at_host=at,
    )  # fmt: skip


def by_token(given: Inputs, states: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hv, Dv], the states after each token), by the definition."""
    q, k, v, dt, a, dt_bias, beta = given
    g, beta = fades(dt, a, dt_bias), 1 / (1 + (-beta).exp())
    out, after = torch.empty_like(v), v.new_empty(len(v), *states.shape[1:])
    for row, length in enumerate(lengths):
        first = sum(lengths[:row])
        for token in range(first, first + length):
            for head in range(HEADS):
                key, query = (x[token, head // (HEADS // KEY_HEADS)] for x in (k, q))
                key, query = (x / (x @ x + 1e-6).sqrt() for x in (key, query))
                before = states[row] if token == first else after[token - 1]
                state = before[head] * g[token, head].exp()
                state = state + torch.outer(key, beta[token, head] * (v[token, head] - state.T @ key))
                after[token, head] = state
                out[token, head] = state.T @ query / KEY**0.5
    return out, after


CASES = {
    "decode": ([1, 1, 1, 1], [0, 1, 2, 3]),
    "drafts": ([4, 1, 3], [3, 4, 7, 0, 1, 2, 3, 5, 6, 7]),
    "chunks": ([130, 64, 65, 7], [31, 129, 193, 258, 265]),
    "mixed": ([1, 70, 1, 16, 17, 3], [0, 39, 70, 71, 87, 104, 107, 105, 106, 107]),
    "nothing kept": ([9], []),
}


@pytest.mark.parametrize(("lengths", "write_at"), CASES.values(), ids=CASES)
def test_as_token_by_token(lengths: list[int], write_at: list[int]) -> None:
    given = inputs(sum(lengths))
    states = torch.randn(len(lengths), HEADS, KEY, VALUE, dtype=torch.float64)
    expected, after = by_token(given, states, lengths)
    before = states.clone()
    out, kept = OPS.gated_delta(*given, states, batch(lengths, write_at))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(kept, after[write_at])
    assert torch.equal(states, before), "its inputs stay as they were"


def test_dtypes() -> None:
    """States of float32 for a model in bfloat16."""
    given, states = inputs(70), torch.zeros(1, HEADS, KEY, VALUE, dtype=torch.float64)
    expected, after = by_token(given, states, [70])
    out, kept = OPS.gated_delta(*(x.bfloat16() for x in given), states.float(), batch([70], [69]))
    assert out.dtype == torch.bfloat16 and kept.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(kept.double(), after[69:], rtol=0.05, atol=0.05)


@pytest.mark.slow  # imports it; the models of engine-models are held against it whole
def test_as_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    states = torch.randn(1, HEADS, KEY, VALUE)
    given = tuple(x.float() for x in inputs(100))
    q, k, v, dt, a, dt_bias, beta = given
    theirs_given = (x[None] for x in (q, k, v, fades(dt, a, dt_bias), beta.sigmoid()))
    expected, last = theirs.torch_chunk_gated_delta_rule(
        *theirs_given, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    out, kept = OPS.gated_delta(*given, states, batch([100], [99]))
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept, last, rtol=1e-4, atol=1e-5)
