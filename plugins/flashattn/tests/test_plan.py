"""Captured launches that stay right, tables that name own pages, and writes that leave nothing behind."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import flash_cards
import flash_libraries
import torch
from flash_body import KernelBody, write_reference

from engine.interfaces.attention import AttentionBatch
from engine.types.kv import KVGroup
from engine_flashattn.implementations import fa3
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


@pytest.mark.parametrize(
    ("steps", "asked", "calls"), [("decodes", 0, 1), ("drafts", 0, 1), ("decodes", 3, 1), ("decodes", 1, 0)]
)
def test_who_computes_what_is_worked_out_once_a_pass(
    monkeypatch: pytest.MonkeyPatch, steps: str, asked: int, calls: int
) -> None:
    """The layer that opens a pass works it out for those after it, in a captured pass as in one before it; what it is
    of another step or bound, the double refuses."""
    seen: list[dict[str, Any]] = []

    def metadata(**given: Any) -> torch.Tensor:
        seen.append(given)
        return flash_libraries.flash_attn_3_metadata(**given)

    def load(self: Any, implementation: Any) -> Any:
        schema = torch._C.parse_schema(flash_libraries.FA3_SCHEMA)
        return fa3.bind(flash_libraries.flash_attn_3_fwd, schema, metadata, flash_libraries.FA3_PROCESSORS)

    monkeypatch.setattr(KernelBody, "load", load)
    subject = Subject.of_card("attention", flash_cards.Fa3, {"implementation": "fa3", "num_splits": asked})
    body = subject.body()(worker_context(subject))
    rows, num_decodes = STEPS[steps]
    cases = [Case(Form(), each, num_decodes, 16, seed=i, width=20) for i, each in enumerate(rows)]
    batch, plan = cases[0].batch, None
    for case in cases:
        cache = case.write_history(body)
        for name, value in vars(case.batch).items():
            if isinstance(value, torch.Tensor):
                getattr(batch, name).copy_(value)
        batch.query_start_loc_host = case.batch.query_start_loc_host
        plan = body.plan(batch, case.group, plan)
        for _ in ("a warm-up", "what is recorded"):
            seen.clear()
            for index in range(3):
                case.layer = replace(case.layer, index=index)
                out, lse = case.outputs()
                case.launch(body, cache, plan, out, lse)
                case.check(out, lse)
            assert len(seen) == calls
            assert all(given["num_splits"] == (asked or 3) for given in seen), "320 keys are three tiles"


def test_the_bound_of_pieces() -> None:
    """As many as fill the GPU with one row, and never more than there are tiles."""

    def most(queries: int, keys: int, heads: int = 32, kv_heads: int = 8, processors: int = 132) -> int:
        q, k = torch.empty(queries, heads, 128), torch.empty(1, 16, kv_heads, 128)
        plan = SimpleNamespace(max_query_len=queries, max_seq_len=keys)
        return fa3.most_splits(SimpleNamespace(q=q, k=k, plan=plan), processors)  # type: ignore[arg-type]

    assert most(1, 40960) == 17 and most(1, 1024) == 8 and most(1, 100) == 1
    assert most(32, 40960) == 17 and most(33, 40960) == 9 and most(8192, 40960) == 1
    assert most(1, 1 << 20, heads=8, kv_heads=1, processors=160) == 128


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
