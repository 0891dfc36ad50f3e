"""The operations beside their formulas, token by token, in float64: rows of any lengths, in one step and in several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.interfaces.model import StateBatch
from engine_states.ops_states.body import StateOpsBody

LENGTHS = ([5, 1, 70, 130], [1, 1, 1], [3], [64, 1])
HEADS, HEAD_SIZE, GROUPS, STATE, KERNEL = 4, 3, 2, 5, 4
CHANNELS = HEADS * HEAD_SIZE


def batch_of(lengths: list[int], every: int) -> StateBatch:
    """Of rows of such lengths; states are kept after each `every` tokens of a row, and at its end. Those of the first
    row are also kept after each token, as behind drafts, where some row has several."""
    loc = np.cumsum([0, *lengths])
    ends = [np.unique([*range(every, n, every), n]) - 1 for n in lengths]
    kept = [start + end for start, end in zip(loc, ends, strict=False)]
    if max(lengths) > 1:
        kept.append(np.arange(lengths[0]))
    write_at = np.concatenate(kept)
    return StateBatch(
        query_start_loc=torch.from_numpy(loc).int(),
        query_start_loc_host=loc.astype(np.int32),
        read=torch.zeros(len(lengths), dtype=torch.int64),
        write=torch.zeros(0, dtype=torch.int64),
        write_at=torch.from_numpy(write_at),
        write_at_host=write_at,
    )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def states_of(step: Any, before: torch.Tensor, batch: StateBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, ...], states [m, ...]) by `step(t, state) -> (state, y)`, one token after the other."""
    loc, ys, states = batch.query_start_loc_host.tolist(), [], []
    for row, state in enumerate(before):
        for t in range(loc[row], loc[row + 1]):
            state, y = step(t, state)
            ys.append(y)
            states.append(state)
    return torch.stack(ys), torch.stack(states)[batch.write_at]


@pytest.fixture
def ops() -> StateOpsBody:
    torch.manual_seed(0)
    nothing: Any = None
    return StateOpsBody(nothing)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_causal_conv(ops: StateOpsBody, lengths: list[int]) -> None:
    batch = batch_of(lengths, 16)
    x, weight, bias = random(sum(lengths), CHANNELS), random(CHANNELS, KERNEL), random(CHANNELS)
    before = random(len(lengths), CHANNELS, KERNEL - 1)

    def step(t: int, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat([past, x[t][:, None]], dim=1)
        return window[:, 1:], F.silu((window * weight).sum(1) + bias)

    torch.testing.assert_close(ops.causal_conv(x, weight, bias, before, batch), states_of(step, before, batch))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_ssd(ops: StateOpsBody, lengths: list[int]) -> None:
    batch, total = batch_of(lengths, 16), sum(lengths)
    x, dt, a = random(total, HEADS, HEAD_SIZE), random(total, HEADS), -random(HEADS).exp()
    b, c, d = random(total, GROUPS, STATE), random(total, GROUPS, STATE), random(HEADS)
    dt_bias, limit, before = random(HEADS), (0.1, 2.0), random(len(lengths), HEADS, HEAD_SIZE, STATE)

    def step(t: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = F.softplus(dt[t] + dt_bias).clamp(*limit)
        ins, outs = (each[t].repeat_interleave(HEADS // GROUPS, 0) for each in (b, c))
        state = (steps * a).exp()[:, None, None] * state + steps[:, None, None] * x[t][:, :, None] * ins[:, None]
        return state, (state * outs[:, None]).sum(-1) + d[:, None] * x[t]

    found = ops.ssd(x, dt, a, b, c, d, dt_bias, limit, before, batch)
    torch.testing.assert_close(found, states_of(step, before, batch))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_selective_scan(ops: StateOpsBody, lengths: list[int]) -> None:
    batch, total = batch_of(lengths, 16), sum(lengths)
    x, dt, gate, a = *(random(total, CHANNELS) for _ in range(3)), -random(CHANNELS, STATE).exp()
    b, c, d, before = (
        random(total, STATE),
        random(total, STATE),
        random(CHANNELS),
        random(len(lengths), CHANNELS, STATE),
    )

    def step(t: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = F.softplus(dt[t])[:, None]
        state = (steps * a).exp() * state + steps * x[t][:, None] * b[t]
        return state, (state @ c[t] + d * x[t]) * F.silu(gate[t])

    found = ops.selective_scan(x, dt, a, b, c, d, gate, before, batch)
    torch.testing.assert_close(found, states_of(step, before, batch))


def test_gated_norm(ops: StateOpsBody) -> None:
    x, gate, weight = random(7, CHANNELS), random(7, CHANNELS), random(CHANNELS)
    parts = (x * F.silu(gate)).view(7, 3, 4)
    expected = (parts / (parts.square().mean(-1, keepdim=True) + 1e-3).sqrt()).view(7, CHANNELS) * weight
    torch.testing.assert_close(ops.gated_norm(x, gate, weight, 1e-3, 4), expected)


def test_gated_norm_with_the_gate_behind_it(ops: StateOpsBody) -> None:
    x, gate, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 8), (5, 8), (8,)))
    normed = F.rms_norm(x.unflatten(-1, (2, 4)), (4,), eps=1e-3).flatten(-2)
    found = ops.gated_norm(x, gate, weight, 1e-3, 4, gate_last=True)
    torch.testing.assert_close(found, normed * weight * F.silu(gate))
