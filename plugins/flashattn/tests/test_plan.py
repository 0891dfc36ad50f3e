"""Captured launches that stay right, tables that name own pages, and writes that leave nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import flash_cards
import torch
from flash_body import write_reference

from engine.interfaces.attention import AttentionBatch
from engine.types.kv import KVGroup
from engine_flashattn.own_pages import name_own_pages
from engine_flashattn.sinks import apply_sinks
from engine_flashattn.write import write_pages
from engine_sdk.conformance.attention.case import Case, Form
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.subject import Subject

STEPS = {
    "decodes": ([[[30], [16], [60], [38]], [[0], [15], [16], [37]], [[1], [2], [90], [16]]], 4),
    "drafts": ([[range(28, 31), range(3)], [range(60, 63), range(88, 91)], [range(3), range(15, 18)]], 0),
}


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("card", [flash_cards.Fa2, flash_cards.Fa3, flash_cards.Fa4, flash_cards.Torch])
def test_captured_launches_serve_later_steps(card: Any, steps: str, window: int | None) -> None:
    """What a step launched is launched again with the numbers that the host gave it first: only what lies in the plan's
    buffers is new. The first step is neither the longest nor the shortest."""
    form = Form(kind="full" if window is None else "sliding", window=window)
    subject = Subject.of_card("attention", card, {"implementation": card.implementation.name})
    body = subject.body()(worker_context(subject))
    per_page = card.tokens_per_page(form.need("cpu"))
    rows, num_decodes = STEPS[steps]
    cases = [Case(form, each, num_decodes, per_page, seed=i, width=8) for i, each in enumerate(rows)]
    first = cases[0]
    batch = first.batch
    first.write_history(body)
    plan = body.plan(batch, first.group)
    captured = copy.copy(plan)
    for case in cases:
        cache = case.write_history(body)
        for name, value in vars(case.batch).items():
            if isinstance(value, torch.Tensor):
                getattr(batch, name).copy_(value)
        batch.query_start_loc_host = case.batch.query_start_loc_host
        batch.seq_lens_bound = case.batch.seq_lens_bound
        assert body.plan(batch, case.group, plan) is plan
        out, lse = case.outputs()
        case.launch(body, cache, captured, out, lse)
        case.check(out, lse)


def test_tables_name_own_pages() -> None:
    """Entries before the window are the first one in it; those after the row's end are its last one."""
    table = torch.arange(4 * 300, dtype=torch.int32).view(4, 300)
    lengths, queries, per_block = [1, 70, 4800, 33], [1, 3, 1, 33], 16
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    for window in (None, 1, 20, 10_000):
        group = KVGroup(
            index=0, kind="full" if window is None else "sliding", sites=(0,), num_kv_heads=1, head_size=8,
            sliding_window=window, tokens_per_block=per_block, layer_bytes=256,
        )  # fmt: skip
        batch = AttentionBatch(
            num_rows=4, num_tokens=sum(queries), num_decodes=0, query_start_loc=starts,
            query_start_loc_host=starts.numpy(), seq_lens=torch.tensor(lengths, dtype=torch.int32),
            seq_lens_bound=torch.tensor(lengths).numpy(), block_table=table,
            slot_mapping=torch.zeros(38, dtype=torch.int64), kv_index=torch.zeros(38, dtype=torch.int64),
        )  # fmt: skip
        out = torch.empty_like(table)
        name_own_pages(batch, group, out)
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
            seen = 0 if window is None else max(0, length - count - window + 1)
            first, last = seen // per_block, (length - 1) // per_block
            expected = [int(table[row, min(max(column, first), last)]) for column in range(300)]
            assert out[row].tolist() == expected


@pytest.mark.parametrize(
    ("per_block", "heads", "size", "dtype"),
    [
        pytest.param(*sizes, dtype, marks=pytest.mark.slow if sizes[0] == 256 else ())
        for sizes in ((16, 3, 8), (1, 1, 24), (7, 2, 40), (256, 1, 64))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ],
)
def test_writes(dtype: torch.dtype, per_block: int, heads: int, size: int) -> None:
    """The kernel leaves the bytes that its description says, in strided pages, and none beside them. The largest pages
    take the interpreter seconds: they are for the slow tests."""
    torch.manual_seed(per_block)
    half = per_block // 2
    starts = [(3, 0, per_block), (1, half, per_block), (6, 0, half + 1), (0, 0, 1), (0, 0, 1)]  # page, first, end
    slots = torch.tensor([page * per_block + place for page, a, b in starts for place in range(a, b)])
    fused = torch.randn(len(slots), 2 * heads, size).to(dtype)
    fused[:: max(1, len(slots) // 5), heads - 1, 1] = torch.nan
    fused[1 :: max(1, len(slots) // 4), -1, size - 1] = torch.inf
    k, v = fused[:, :heads], fused[:, heads:]
    pools = []
    for write in (write_pages, write_reference):
        pool = torch.full((8, 3 * 2 * per_block * heads * size), torch.nan, dtype=dtype)
        layer = pool[:, 2 * per_block * heads * size : 2 * 2 * per_block * heads * size]
        both = layer.unflatten(1, (2, per_block, heads, size))
        write(k, v, both[:, 0], both[:, 1], slots)
        pools.append(pool)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8)) or torch.equal(
        pools[0].nan_to_num(123.0), pools[1].nan_to_num(123.0)
    )
    values = pools[0].unflatten(1, (3, 2, per_block, heads, size))[:, 1, 1]
    assert values[[3, 6]].isfinite().all() and pools[0].unflatten(1, (3, -1))[:, [0, 2]].isnan().all()


def test_sinks_after_the_fact() -> None:
    torch.manual_seed(0)
    scores, values, sinks = torch.randn(5, 3, 11) * 4, torch.randn(11, 16), torch.tensor([-3.0, 0.5, 90.0])
    out = torch.softmax(scores, -1) @ values
    sums, lse = torch.logsumexp(scores, -1), torch.full((5, 3), torch.nan)
    with_sink = torch.cat((scores, sinks.view(1, 3, 1).expand(5, 3, 1)), -1)
    expected = torch.softmax(with_sink, -1)[..., :-1] @ values
    alone = out.clone()
    apply_sinks(out, sums.T.contiguous(), sinks, lse)
    apply_sinks(alone, sums.T.contiguous(), sinks, None)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.logsumexp(with_sink, -1))
    assert torch.equal(alone, out)
