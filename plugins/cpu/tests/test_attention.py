"""The native attention against float64 and against the reference driver, at every level of processor features."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, LayerCache
from engine.types.errors import ConfigError
from engine.types.kv import KVGroup
from engine_reference.attention_torch.attention import TorchAttentionBody

pytest.importorskip("engine_cpu.attention_cpu.card", reason="engine-cpu is not installed")

from attention_case import Case, Form, Row, make_driver

from engine_cpu.attention_cpu.card import CpuAttention, CpuAttentionOptions

LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_bf16")
DTYPES = [
    (torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.int8), (torch.float32, torch.float8_e4m3fn),
]  # fmt: skip
OTHERS = [(torch.float32, torch.int8), (torch.bfloat16, torch.float8_e4m3fn)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
"""Weights are rounded to bfloat16 with the rest."""


@pytest.fixture(scope="module", params=LEVELS)
def body(request: pytest.FixtureRequest) -> Any:
    """The driver, forced to one level; skipped where the processor has not got it."""
    return driver(request.param)


def driver(level: str) -> Any:
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    if level not in ("auto", *native.levels()):
        pytest.skip(f"this processor, or the compiler, has no {level}")
    return make_driver(level)


def on_threads(count: int, level: str = "auto") -> Any:
    """A driver that computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return driver(level)
    finally:
        torch.set_num_threads(before)


def rows_of(form: Form, indices: list[list[int]], seed: int = 0) -> list[Row]:
    return [Row.random(form, index, seed + i) for i, index in enumerate(indices)]


forms = st.builds(
    Form,
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4, 7, 8]),
    size=st.sampled_from([2, 16, 48, 64, 80, 112, 128, 256]),
    block=st.sampled_from([2, 4, 16, 24, 32, 48]),
    window=st.sampled_from([None, None, 1, 2, 5, 100, 129]),
    cap=st.sampled_from([None, 0.5, 20.0]),
    sinks=st.booleans(),
    alibi=st.booleans(),
)


@st.composite
def batches(draw: st.DrawFn) -> list[list[int]]:
    """Decode rows, then rows of any number of queries, contiguous or not."""
    rows = [[n] for n in draw(st.lists(st.integers(0, 700), max_size=4))]
    for _ in range(draw(st.integers(0 if rows else 1, 2))):
        if draw(st.booleans()):
            start = draw(st.integers(0, 300))
            rows.append(list(range(start, start + draw(st.integers(1, 60)))))
        else:
            rows.append(sorted(draw(st.sets(st.integers(0, 400), min_size=1, max_size=8))))
    return rows


@given(forms, batches(), st.sampled_from(DTYPES + OTHERS), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_ragged_batches(
    body: Any, form: Form, indices: list[list[int]], dtypes: tuple, rows: int, tokens: int, seed: int
) -> None:
    """All forms at once; NaN wherever nothing is to be seen, padding rows and tokens."""
    form = replace(form, dtype=dtypes[0], kv_dtype=dtypes[1])
    case = Case(form, rows_of(form, indices, seed), padding_rows=rows, padding_tokens=tokens, seed=seed)
    case.check(body, TOLERANCE[form.dtype])


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 7, 100, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 8))])
def test_long_rows(body: Any, dtype: torch.dtype, kv_dtype: torch.dtype | None, group: int) -> None:
    """More segments than one, several tiles, a window in the middle; with queries in any order."""
    form = Form(heads=1, group=group, size=64, dtype=dtype, kv_dtype=kv_dtype)
    prompt = range(300 if group < 100 else 40)  # a tile holds the queries of a group's heads
    indices = [[2999], [1023], [5], list(range(700, 705)), list(prompt), [900, 3, 450, 451]]
    Case(form, rows_of(form, indices)).check(body, TOLERANCE[dtype])
    windowed = replace(form, window=1500, sinks=True)
    Case(windowed, rows_of(windowed, indices)).check(body, TOLERANCE[dtype])


@pytest.mark.parametrize("size", [1, 5, 7, 15, 31])
@pytest.mark.parametrize("block", [1, 3, 7, 17])
def test_odd_sizes_in_float32(body: Any, size: int, block: int) -> None:
    form = Form(size=size, block=block)
    Case(form, rows_of(form, [[200], [8], list(range(5, 40))])).check(body, TOLERANCE[torch.float32])


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES, ids=str)
def test_the_reference_driver_says_the_same(body: Any, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    form = Form(4, 4, 96, window=200, cap=30.0, sinks=True, alibi=True, dtype=dtype, kv_dtype=kv_dtype)
    case = Case(form, rows_of(form, [[800], [17], list(range(100, 300)), [7, 40, 300]]), padding_tokens=3)
    theirs = case.run(TorchAttentionBody(None))  # type: ignore[arg-type]
    ours = case.run(body)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int) -> None:
    """Bit by bit: alone or in a batch, on one thread or several, divided among them or not."""
    one, several = on_threads(1), on_threads(3)
    form = Form(heads=2, group=2, size=64, window=window, dtype=dtype, kv_dtype=kv_dtype)
    rows = rows_of(form, [[3000], [10], [700], list(range(1000, 1004)), list(range(200))])
    case = Case(form, rows)
    out, lse = case.run(one)
    assert all(torch.equal(a, b) for a, b in zip(case.run(several), (out, lse), strict=True))
    start = 0
    for row in rows:
        stop = start + len(row.index)
        for body in (one, several):
            alone = Case(form, [row], seed=9).run(body)
            assert torch.equal(alone[0], out[start:stop]) and torch.equal(alone[1], lse[start:stop])
        start = stop


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1000])
def test_rows_that_share_pages(dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int | None) -> None:
    """They are computed together: each with the bits that it has in pages of its own. Two beginnings, which rows have
    in part or whole; more rows than a tile has; drafts; with a window, rows that do not see all of them, and all else
    that may change a score."""
    form = Form(heads=2, group=7, size=32, block=32, window=window, dtype=dtype, kv_dtype=kv_dtype)
    if window is not None:
        form = replace(form, cap=20.0, sinks=True, alibi=True)
    beginnings = {0: (512, [*range(1, 18), 22]), 18: (800, [19, 20, 21])}
    lengths = [530, 511, 512, 700, 300, 800, 1200, *range(513, 524), 900, 820, 1100, 850]
    rows = rows_of(form, [[n] for n in lengths] + [list(range(600, 604))])
    for first, (count, others) in beginnings.items():
        for r in others:
            keys = min(count, len(rows[r].k))
            rows[r].k[:keys], rows[r].v[:keys] = rows[first].k[:keys], rows[first].v[:keys]
    case = Case(form, rows, padding_rows=1)
    bodies = [on_threads(1), on_threads(3)]
    apart = case.check(bodies[0], TOLERANCE[dtype])
    table = case.batch.block_table
    for first, (count, others) in beginnings.items():
        for r in others:
            pages = min(count, len(rows[r].k) - 1) // form.block
            table[r, :pages] = table[first, :pages]
    for body in bodies:
        assert all(torch.equal(a, b) for a, b in zip(case.check(body, TOLERANCE[dtype]), apart, strict=True))


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_prompts_may_be_cut_anywhere(kv_dtype: torch.dtype | None) -> None:
    """The same bits for a prompt's queries in one step or in several, as long as a step has many."""
    form, body = Form(heads=1, group=4, size=32, dtype=torch.bfloat16, kv_dtype=kv_dtype), driver("auto")
    row = Row.random(form, list(range(400)), 0)
    whole, _ = Case(form, [row]).run(body)
    for start, stop in pairwise((0, 50, 213, 400)):
        part = replace(row, index=row.index[start:stop], k=row.k[:stop], v=row.v[:stop], q=row.q[start:stop])
        assert torch.equal(Case(form, [part]).run(body)[0], whole[start:stop])


def test_a_captured_step_serves_longer_rows(body: Any) -> None:
    """What was recorded reads lengths, tables and slots from the batch's memory."""
    native = pytest.importorskip("engine_cpu._native")
    assert body.capture_level == "any"
    form = Form(heads=2, group=2, size=64, dtype=torch.bfloat16)
    first = Case(form, rows_of(form, [[4], [20]]), padding_rows=1)
    later = Case(form, rows_of(form, [[900], [333]], seed=5), padding_rows=1)
    width = later.batch.block_table.shape[1]
    table = torch.zeros(3, width, dtype=torch.int32)
    table[:, : first.batch.block_table.shape[1]] = first.batch.block_table
    first.batch.block_table = table
    # One pool for both: the second case's pages under the first one's.
    pool = torch.zeros(len(later.pool) + 8, later.pool.shape[1], dtype=torch.uint8)
    pool[: len(first.pool)] = first.pool
    first.pool = pool
    tape = native.Tape()

    def record(launch: Any) -> None:
        with tape:
            launch()

    out, lse = first.run(body, record)
    expected = [row.expected(first.layer)[0] for row in first.rows]
    torch.testing.assert_close(out[:2].double(), torch.cat(expected), rtol=1.5e-2, atol=1.5e-2)
    assert tape.names == ["attention_write", "attention"]

    later_cache, _ = later.start(body)
    del later_cache
    pool[: len(later.pool)] = later.pool
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "kv_index"):
        getattr(first.batch, name).copy_(getattr(later.batch, name))
    first.q.copy_(later.q)
    first.k.copy_(later.k)
    first.v.copy_(later.v)
    tape.replay()
    eager = later.run(body)
    assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])


def test_a_refilled_plan_is_the_same(body: Any) -> None:
    form = Form()
    first, second = (Case(form, rows_of(form, [[n], [n + 3]])) for n in (5, 60))
    plan = body.plan(first.batch, first.group)
    assert body.plan(second.batch, second.group, plan) is plan
    cache, _ = second.start(body)
    body.write(second.layer, second.k, second.v, cache, plan)
    out = torch.empty_like(second.q)
    body.forward(second.layer, second.q, second.k, second.v, cache, plan, out)
    assert torch.equal(out, second.run(body)[0])


def test_views_of_one_projection(body: Any) -> None:
    """q, k and v as models cut them, and results that are not dense."""
    form = Form(heads=2, group=3, size=32, dtype=torch.bfloat16)
    case = Case(form, rows_of(form, [[40], list(range(30))]))
    expected = case.run(body)
    both = torch.cat((case.q, case.k, case.v), dim=1)
    case.q = both[:, :6]
    case.k = both[:, 6:8]
    case.v = both[:, 8:]
    assert all(torch.equal(a, b) for a, b in zip(case.run(body), expected, strict=True))
    turned = both.transpose(1, 2).contiguous().transpose(1, 2)
    case.q = turned[:, :6]
    case.k = turned[:, 6:8]
    case.v = turned[:, 8:]
    cache, plan = case.start(body)
    body.write(case.layer, case.k, case.v, cache, plan)
    out, lse = torch.empty(31, 6, 64, dtype=form.dtype)[..., ::2], torch.empty(6, 31, dtype=torch.float64).T
    body.forward(case.layer, case.q, case.k, case.v, cache, plan, out, lse)
    assert torch.equal(out, expected[0]) and torch.equal(lse.float(), expected[1])


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_in_registers_or_in_memory(body: Any, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Few rows of queries decode 8 bits where they multiply, many once for all: with the same bits."""
    form = Form(heads=2, group=2, size=72, block=24, dtype=dtype, kv_dtype=kv_dtype)
    row = Row.random(form, list(range(90, 130)), 3)
    whole, sums = Case(form, [row]).run(body)
    for count in (1, 3, 8):  # up to 16 rows of queries are few
        part = replace(row, index=row.index[-count:], q=row.q[-count:])
        out, lse = Case(form, [part]).run(body)
        assert torch.equal(out, whole[-count:]) and torch.equal(lse, sums[-count:])


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_the_references(body: Any, kv_dtype: torch.dtype) -> None:
    """Bit for bit: of numbers halfway between two codes, of none but zeros, tiny ones, huge ones and none at all."""
    form = Form(heads=2, size=50, block=6, kv_dtype=kv_dtype)
    row = Row.random(form, list(range(40)), 0)
    for x, sign in ((row.k, 1), (row.v, -1)):
        x[0] = 0
        x[1] *= 1e-39
        x[2] *= 1e-37
        x[3] *= 1e37
        x[4, :, :3] = torch.tensor([448.0, 1.0625, 0.5]) * sign
        x[5] = (torch.arange(50) + 0.5) * sign
        x[5, :, 0] = 127
        x[6, 0, 7] = 2.0**-130
    for place, value in ((7, torch.nan), (8, torch.inf), (9, -torch.inf)):
        row.k[place, 1, 3] = value
        row.v[place + 3, 1, 3] = value
    found = []
    for driver in (body, TorchAttentionBody(None)):  # type: ignore[arg-type]
        case = Case(form, [row])
        cache, plan = case.start(driver)
        driver.write(case.layer, case.k, case.v, cache, plan)
        found.append(driver.read(case.group, cache, case.batch.slot_mapping))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert found[0][0][7, 1].isnan().all() and found[0][0][10, 1].isnan().all() and not found[0][1][10, 1].any()


def test_writes_stay_in_their_layer_and_page(body: Any) -> None:
    for dtype, kv_dtype in (*DTYPES, *OTHERS):
        form = Form(heads=3, size=20, block=6, dtype=dtype, kv_dtype=kv_dtype)
        case = Case(form, rows_of(form, [[5], list(range(7, 15))]))
        before = case.pool.clone()
        cache, plan = case.start(body)
        body.write(case.layer, case.k, case.v, cache, plan)
        changed = (before != case.pool).any(dim=0).nonzero()
        assert len(changed) and changed.min() >= case.group.layer_bytes
        used = {0} | set((case.batch.slot_mapping // form.block).tolist())
        used |= {int(slot) // form.block for slots, _, _ in case._old for slot in slots}
        assert set((before != case.pool).any(dim=1).nonzero().flatten().tolist()) <= used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_without_a_cache(body: Any, dtype: torch.dtype, features: bool, padding: int) -> None:
    """Layers of kind encoder: each query sees its whole row."""
    lengths, heads, group, size = (5, 1, 17, 140), 2, 2, 32
    form = Form(heads, group, size, sinks=features, alibi=features, cap=5.0 if features else None, dtype=dtype)
    case = Case(form, rows_of(form, [list(range(n)) for n in lengths]), padding_tokens=padding)
    kv_group = KVGroup(
        index=0, kind="encoder", sites=(0,), num_kv_heads=heads, head_size=size, sliding_window=None,
        tokens_per_block=16, layer_bytes=0,
    )  # fmt: skip
    layer = AttentionLayer(
        index=0, group=kv_group, need=replace(case.layer.need, kind="encoder"), scale=0.2, sinks=case.layer.sinks,
        alibi_slopes=case.layer.alibi_slopes,
    )  # fmt: skip
    batch = AttentionBatch(
        **{**vars(case.batch), "block_table": torch.zeros(4, 0, dtype=torch.int32), "num_decodes": 0}
    )
    plan = body.plan(batch, kv_group)
    assert body.plan(batch, kv_group, plan) is plan
    out, lse = torch.full_like(case.q, torch.nan), torch.full(case.q.shape[:2], torch.nan)
    body.forward(layer, case.q, case.k, case.v, LayerCache(case.k[:0], case.v[:0]), plan, out, lse)
    parts = [row.expected(layer, whole=True) for row in case.rows]
    expected, sums = (torch.cat(part) for part in zip(*parts, strict=True))
    real = len(expected)
    torch.testing.assert_close(out[:real].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse[:real].double(), sums, rtol=2e-5, atol=2e-5)
    assert not out[real:].any() and not lse[real:].any()


def test_nan_that_a_query_sees_comes_out(body: Any) -> None:
    """A broken request is noticed by its logits; its neighbours are not touched."""
    form = Form(heads=1, group=2, size=32, dtype=torch.bfloat16)
    rows = rows_of(form, [[300], [300]])
    rows[0].k[7] = torch.nan
    out, _ = Case(form, rows).run(body)
    assert out[0].isnan().all() and out[1].isfinite().all()


def need(**changes: Any) -> AttentionNeed:
    facts = {
        "kind": "full", "head_size": 8, "num_q_heads": 2, "num_kv_heads": 2, "dtype": "bfloat16",
        "kv_dtype": "bfloat16", "device": "cpu", "block_size": 16,
    }  # fmt: skip
    return AttentionNeed(**{**facts, **changes})


def test_card(native: Any) -> None:
    if native.levels() == ["scalar"]:
        pytest.skip("this processor has neither AVX2 nor NEON")
    served = frozenset({"kv_index", "sinks", "alibi"})
    assert CpuAttention.unsupported(need(soft_cap=3.0, features=served)) == []
    assert CpuAttention.unsupported(need(kind="sliding", sliding_window=5)) == []
    assert CpuAttention.unsupported(need(dtype="float32", head_size=7, kv_dtype="float32", block_size=1)) == []
    assert CpuAttention.unsupported(need(dtype="float32", block_size=2)) == []
    assert CpuAttention.unsupported(need(kind="encoder", block_size=1, kv_dtype="float16")) == []
    assert CpuAttention.tokens_per_page(need(block_size=4)) == 4
    for kv_dtype in ("int8", "float8_e4m3fn"):
        assert CpuAttention.unsupported(need(kv_dtype=kv_dtype, features=served)) == []
        assert CpuAttention.scale_bytes(need(kv_dtype=kv_dtype)) == 2 and CpuAttention.scale_bytes(need()) == 0
        assert CpuAttention.scale_bytes(need(kind="encoder", kv_dtype=kv_dtype)) == 0
        (reason,) = CpuAttention.unsupported(need(kv_dtype=kv_dtype, head_size=7))
        assert "7 elements" in reason and kv_dtype in reason
    for word, changes in (
        ("mla", {"kind": "mla"}), ("cuda:0", {"device": "cuda:0"}),
        ("float16", {"dtype": "float16"}), ("float16", {"kv_dtype": "float16"}),
        ("saves no memory", {"kv_dtype": "float32"}), ("7 elements", {"head_size": 7}),
        ("3 tokens", {"block_size": 3}), ("tree_mask", {"features": frozenset({"tree_mask"})}),
    ):  # fmt: skip
        (reason,) = CpuAttention.unsupported(need(**changes))
        assert word in reason


def test_a_level_that_is_not_there(native: Any) -> None:
    for level in LEVELS:
        if level not in native.levels():
            with pytest.raises(ConfigError, match=level):
                make_driver(level)
    with pytest.raises(ValueError, match="level"):
        CpuAttentionOptions(level="mmx")  # type: ignore[arg-type]
