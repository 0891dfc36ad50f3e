"""The attention in Triton against dense float64 attention and the reference driver, in Triton's interpreter.

On a GPU the same tests run on the GPU. What is tested in more forms, and takes minutes, is in
`test_attention_triton_conformance.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.attention import AttentionNeed, LayerCache, Rotation
from engine.types.parallel import Parallel
from engine_cuda import attention_reasons
from engine_cuda.attention_mla.card import TritonLatentAttention
from engine_cuda.attention_triton.body import TritonAttentionBody
from engine_cuda.attention_triton.card import TritonAttention, TritonAttentionOptions
from engine_cuda.attention_triton.items import FIELDS
from engine_cuda.attention_triton.plan import TritonPlan
from engine_cuda.interpreter import interpreted
from engine_cuda.ops_triton.body import TritonOpsBody
from engine_reference.attention_torch.attention import TorchAttentionBody
from engine_sdk.conformance.attention.case import Case, Form, check_plans_by_launches, check_unseen, whole_rows
from engine_sdk.conformance.attention.dense import Tree

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [] if interpreted() else pytest.mark.gpu
MIXED = [[50], [3], range(5, 8), range(12), range(40, 60)]
"""Two decodes, a short extend, a prompt and a later chunk of one."""


def driver(dtype: str = "float32", split_kv: bool = True, num_q_heads: int = 4) -> TritonAttentionBody:
    """The driver, as the engine builds it; `num_q_heads` of its model."""
    start = SimpleNamespace(model=SimpleNamespace(num_q_heads=num_q_heads), parallel=Parallel(), kv_cache_dtype=None)
    options = TritonAttentionOptions(split_kv=split_kv)
    device = torch.device(DEVICE)
    context: Any = SimpleNamespace(options=options, device=device, dtype=getattr(torch, dtype), start=start)
    return TritonAttentionBody(context)


def case(form: Form, rows: Any, num_decodes: int, **how: Any) -> Case:
    return Case(form, rows, num_decodes, form.block_size * form.blocks, device=DEVICE, **how)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(Form(dtype="bfloat16", head_size=80, group_size=3), marks=pytest.mark.slow),
        Form(dtype="float32", kind="sliding", window=9, soft_cap=2.0, sinks=True, alibi=True, block_size=32),
        pytest.param(
            Form(dtype="bfloat16", kv_dtype="float8_e4m3fn", block_size=4, num_kv_heads=1, group_size=5),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["padded heads", "everything", "fp8"],
)
def test_rows_of_all_kinds(form: Form) -> None:
    """Decodes, extends and prompts in one step, whose rows are divided; everything that must not be read is NaN."""
    some = case(form, MIXED, 2, padding_tokens=3, bound=5, strided=True)
    some.check(*some.run(driver(form.dtype)))


@pytest.mark.slow
def test_decodes_that_are_divided() -> None:
    """Long rows beside short ones; windows begin in the middle of them; padding rows."""
    for window in (None, 70):
        form = Form(kind="full" if window is None else "sliding", window=window, num_kv_heads=1, sinks=True)
        some = case(form, [[180], [3], [50]], 3, padding_rows=1)
        body = driver()
        found = some.run(body)
        some.check(*found)
        if window is None:
            assert items(body.plan(some.batch, some.group))[0][:, 10].max() > 1, "no row was divided"


def test_plans_by_launches() -> None:
    """A decode step's is refilled for others of which the host is not told, as in a whole step that is captured."""
    form = Form(kind="sliding", window=9, num_kv_heads=1)
    steps = [([[20], [7], [33]], 0), ([[1], [40]], 1), ([[0], [15], [16]], 0)]
    cases = [
        case(form, rows, len(rows), seed=seed, width=8, padding_rows=padding)
        for seed, (rows, padding) in enumerate(steps)
    ]
    check_plans_by_launches(cases, driver())


def test_trees_of_drafts() -> None:
    """Beside a decode and a prompt, of nodes that lie in one page and in two."""
    form = Form(dtype="float32", kind="sliding", window=64, block_size=8)
    rows = [[50], range(29, 36), range(80, 87), range(12)]
    trees = {1: Tree([0, 0, 1, 1, 2, 4]), 2: Tree([0, 1, 1, 0, 4, 3])}
    made = case(form, rows, 1, trees=trees)
    made.check(*made.run(driver()))
    case(form, rows, 1, trees=trees).check_move(driver())


@pytest.mark.slow
def test_what_some_queries_do_not_see() -> None:
    """Values that are not numbers, of keys that some queries of a tile see and others do not: later, or gone."""
    form = Form(kind="sliding", window=20, dtype="bfloat16", num_kv_heads=1)
    rows = [[20], range(4), range(30, 36)]
    check_unseen(lambda: case(form, rows, 1), driver("bfloat16"), [(1, 3), (2, 33), (2, 13)])


@given(
    st.builds(
        Form,
        kind=st.just("full"),
        num_kv_heads=st.sampled_from([1, 2]),
        group_size=st.sampled_from([1, 2, 7]),
        head_size=st.sampled_from([16, 24, 32]),
        block_size=st.sampled_from([1, 7, 16, 64]),
        soft_cap=st.sampled_from([None, 0.5]),
        window=st.sampled_from([None, None, 1, 5, 40]),
        sinks=st.booleans(),
        alibi=st.booleans(),
    ),
    st.lists(st.integers(0, 90), max_size=3),
    st.lists(
        st.one_of(st.sets(st.integers(0, 60), min_size=1, max_size=20), st.integers(1, 40)), min_size=1, max_size=2
    ),
    st.integers(0, 1000),
)
@pytest.mark.slow
@settings(max_examples=10 if interpreted() else 100, deadline=None, derandomize=True)
def test_ragged_batches(form: Form, decodes: list[int], others: list[Any], seed: int) -> None:
    """Of any form; queries contiguous or not."""
    form = replace(form, kind="full" if form.window is None else "sliding")
    rows = [[n] for n in decodes] + [list(range(n)) if isinstance(n, int) else sorted(n) for n in others]
    some = case(form, rows, len(decodes), seed=seed, padding_tokens=seed % 3)
    some.check(*some.run(driver()))


@pytest.mark.skipif(not interpreted(), reason="a GPU may round the last bit of two kernels' sums otherwise")
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("kv_dtype", "rotary"), [(None, 24), ("float8_e4m3fn", 32)])
def test_rotating_is_that_of_the_operations(kv_dtype: str | None, rotary: int, normed: bool) -> None:
    """Bit by bit, in queries and in the pool: of a value that is no number too, whose key is not stored."""
    form = Form(dtype="bfloat16", kv_dtype=kv_dtype, head_size=32)
    one, other = (case(form, [[20], range(3, 9), range(5)], 1, strided=True, padding_tokens=2) for _ in range(2))
    random = torch.Generator().manual_seed(0)
    cos_sin = torch.randn(40, rotary, generator=random).to(DEVICE)
    positions = torch.randint(0, 40, (len(one.q),), generator=random).to(DEVICE)
    weights = [torch.randn(32, generator=random).bfloat16().to(DEVICE) for _ in range(2)]
    body, ops = driver("bfloat16"), TritonOpsBody(None)  # type: ignore[arg-type]
    for each in (one, other):
        each.new_v[2, 0, 5], each.new_v[4, 1, 0] = float("nan"), float("inf")
        each.new_k[:, 0] *= 300  # more than 8 bits hold
    cache, plan = one.write_history(body), body.plan(one.batch, one.group)
    rotation = Rotation(positions, cos_sin, (weights[0], weights[1]) if normed else (), 1e-5)
    q, _ = body.write_rotated(one.layer, one.q, one.new_k, one.new_v, rotation, cache, plan)
    cache = other.write_history(body)
    if normed:
        given = ops.qk_norm_rope(other.q, other.new_k, weights[0], weights[1], 1e-5, positions, cos_sin)
    else:
        given = ops.rope(other.q, other.new_k, positions, cos_sin)
    body.write(other.layer, given[1], other.new_v, cache, plan)
    assert torch.equal(q, given[0])
    assert torch.equal(one.pool.view(torch.uint8), other.pool.view(torch.uint8))


def test_the_reference_driver_says_the_same() -> None:
    """In a cache of fp8, whose layout is each driver's own."""
    form = Form(kv_dtype="float8_e4m3fn", head_size=32)
    mine, theirs = (case(form, MIXED, 2) for _ in range(2))
    found, expected = mine.run(driver()), theirs.run(TorchAttentionBody(None))  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_fp8_cannot_hold_becomes_its_largest_number() -> None:
    some = case(Form(kv_dtype="float8_e4m3fn"), [[0], [1]], 2)
    body = driver()
    cache, plan = body.cache(some.need, some.group, some.pages), body.plan(some.batch, some.group)
    values = torch.full_like(some.new_k, 1e6)
    values[0, 0, :5] = torch.tensor([-torch.inf, torch.nan, 0.3, 0.0, 0.001])
    body.write(some.layer, values, torch.where(values.isnan(), 0, -values), cache, plan)
    page, offset = divmod(int(some.batch.slot_mapping[0]), 16)
    found = cache.k[page, 0, offset].float()
    assert found[1].isnan() and found[[0, 2, 3, 4, 5]].tolist() == [-448, 0.3125, 0, 0.001953125, 448]
    assert cache.v[page, 1, offset].float().tolist() == [-448] * 16


# -- plans -----------------------------------------------------------------------------------------------------------
def items(plan: TritonPlan) -> list[np.ndarray]:
    """Those of each list that are something to do."""
    lists = [work.items.cpu().numpy() for work in plan.lists]
    assert all(lines.shape[1] == FIELDS for lines in lists)
    return [lines[lines[:, 3] > 0] for lines in lists]


@pytest.mark.parametrize(
    "num_decodes", [pytest.param(5, id="decodes", marks=pytest.mark.slow), pytest.param(0, id="drafts")]
)
def test_a_captured_step_serves_longer_rows(num_decodes: int) -> None:
    """What is launched again, with the same arguments, reads lengths, pages and places from the batch's memory: as a
    CUDA graph does. The plan is made for the shortest rows."""
    if num_decodes:
        steps = [[[0], [1], [3], [2], [0]], [[30], [16], [130], [38], [7]], [[1], [2], [40], [16], [0]]]
    else:
        steps = [[range(n, n + 4) for n in starts] for starts in ((0, 1, 0), (30, 7, 120), (2, 50, 0))]
    form = Form(head_size=16, num_kv_heads=1)
    cases = [case(form, rows, num_decodes, seed=i, width=14) for i, rows in enumerate(steps)]
    body, first = driver(), cases[0]
    pool = torch.zeros(max(len(c.pool) for c in cases), first.pool.shape[1], dtype=torch.uint8, device=DEVICE)
    pages = pool[:, first.group.layer_bytes : 2 * first.group.layer_bytes]
    cache, plan = body.cache(first.need, first.group, pages), body.plan(first.batch, first.group)
    out, lse = first.outputs()
    grids = [work.bound for work in plan.lists]
    for some in cases:
        some.write_history(body)
        pool[: len(some.pool)] = some.pool
        for mine, other in ((first.q, some.q), (first.new_k, some.new_k), (first.new_v, some.new_v)):
            mine.copy_(other)
        for name, value in vars(first.batch).items():
            other = getattr(some.batch, name)
            if isinstance(value, torch.Tensor):
                value.copy_(other)
            elif isinstance(value, np.ndarray):
                value[:] = other
        assert body.plan(first.batch, first.group, plan) is plan
        assert [work.bound for work in plan.lists] == grids
        first.launch(body, cache, plan, out, lse)
        some.pool = pool[: len(some.pool)]
        some.before = pool[: len(some.pool)].clone()
        some.check(out, lse)


def test_a_plan_is_for_its_kinds_of_rows() -> None:
    """A step of decodes launches one kernel, one of drafts too; a captured one is not refilled with other kinds."""
    body = driver()
    form = Form()
    decodes, drafts, mixed = case(form, [[4], [5]], 2), case(form, [range(4), range(9, 13)], 0), case(form, MIXED, 2)
    for some in (decodes, drafts, mixed):
        body.cache(some.need, some.group, some.pages)
    assert [[work.is_long for work in body.plan(c.batch, c.group).lists] for c in (decodes, drafts, mixed)] == [
        [False], [False], [False, True],
    ]  # fmt: skip
    plan = body.plan(drafts.batch, drafts.group)
    ragged = case(form, [[0], range(40, 47)], 1)
    assert ragged.batch.num_tokens == drafts.batch.num_tokens
    body.plan(ragged.batch, ragged.group, plan)  # up to 8 tokens are few
    wide = case(form, [range(60), range(40, 48)], 0)
    with pytest.raises(AssertionError, match="any_rows"):
        body.plan(wide.batch, wide.group, plan)


def test_work_is_divided_evenly() -> None:
    """One wave of programs, where there is too little work for more; every key once."""
    some = case(Form(num_kv_heads=1), [[500], [20], [90], [600]], 4)
    body = driver()
    body.cache(some.need, some.group, some.pages)
    plan = body.plan(some.batch, some.group)
    (work,), (lines,) = plan.lists, items(plan)
    assert 4 < len(lines) <= work.wave
    for row, length in enumerate(some.lengths.tolist()):
        its = lines[lines[:, 0] == row]
        spans = sorted((begin, end) for begin, end in its[:, 4:6].tolist())
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == length
        assert sorted(its[:, 9]) == list(range(len(its))) and set(its[:, 10]) == {len(its)}
        tiles = [-(-(end - begin) // work.tiles.keys) for begin, end in spans]
        assert max(tiles) <= -(-sum(-(-int(n) // 16) for n in some.lengths) // (work.wave - 4)) + 1
    slots = [line[11] + line[9] for line in lines if line[10] > 1]
    assert len(set(slots)) == len(slots) and max(slots) < work.slots


def test_without_division_a_row_has_the_same_bits_alone() -> None:
    body = driver(split_kv=False)
    form = Form(num_kv_heads=1, head_size=32)
    some = case(form, [[140], [3]], 2)
    out, lse = some.run(body)
    assert all(lines[:, 10].max() == 1 for lines in items(body.plan(some.batch, some.group)))
    alone = case(form, [[140]], 1)
    for name in ("k", "v", "q", "new_k", "new_v"):
        setattr(alone, name, getattr(some, name)[:1])
    found = alone.run(body)
    assert torch.equal(found[0][0], out[0]) and torch.equal(found[1][0], lse[0])


def test_rows_without_a_cache() -> None:
    """With a guess of the group that is right, and one that is wrong: slower, not wrong."""
    for num_q_heads in (4, 64):
        form = Form(kind="encoder", soft_cap=2.0, sinks=True, alibi=True, dtype="float16")
        some = whole_rows(form, (5, 1, 41), DEVICE, padding=3)
        some.check(*some.run(driver("float16", num_q_heads=num_q_heads)))


@pytest.mark.slow
def test_tensors_that_are_not_dense() -> None:
    form = Form(num_kv_heads=1)
    some = case(form, [[20], range(6)], 1)
    body = driver()
    expected = some.run(body)
    again = case(form, [[20], range(6)], 1)
    turned = torch.cat((again.q, again.new_k, again.new_v), 1).transpose(1, 2).contiguous().transpose(1, 2)
    again.q = turned[:, :2]
    again.new_k = turned[:, 2:3]
    again.new_v = turned[:, 3:]
    cache = again.write_history(body)
    out = torch.empty(7, 2, 32, device=DEVICE)[..., ::2]
    lse = torch.empty(2, 7, device=DEVICE).T
    again.launch(body, cache, body.plan(again.batch, again.group), out, lse)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    encoder = whole_rows(Form(dtype="float32"), (6,), DEVICE)
    outs = []
    for k in (encoder.new_k, encoder.new_k.transpose(1, 2).contiguous().transpose(1, 2)):
        outs.append(torch.empty_like(encoder.q))
        plan = body.plan(encoder.batch, encoder.group)
        body.forward(encoder.layer, encoder.q, k, encoder.new_v, LayerCache(k[:0], k[:0]), plan, outs[-1])
    assert torch.equal(*outs)


# -- the card --------------------------------------------------------------------------------------------------------
def need(**changes: Any) -> AttentionNeed:
    facts = {
        "kind": "full", "head_size": 128, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16",
        "kv_dtype": "bfloat16", "device": "cuda", "block_size": 16,
    }  # fmt: skip
    return AttentionNeed(**{**facts, **changes})


def test_card(monkeypatch: pytest.MonkeyPatch) -> None:
    served = frozenset({"kv_index", "sinks", "alibi"})
    assert TritonAttention.unsupported(need(soft_cap=3.0, features=served)) == []
    monkeypatch.setattr(attention_reasons, "machine", lambda: SimpleNamespace(capability=(9, 0)))
    assert TritonAttention.unsupported(need(kind="sliding", sliding_window=5, kv_dtype="float8_e4m3fn")) == []
    assert TritonAttention.unsupported(need(kind="encoder", head_size=7, block_size=1)) == []
    for word, changes in (
        ("mla", {"kind": "mla"}), ("xpu", {"device": "xpu:0"}),
        ("float64", {"dtype": "float64"}), ("float8_e5m2", {"kv_dtype": "float8_e5m2"}),
        ("saves no memory", {"kv_dtype": "float32"}), ("up to 256", {"head_size": 512}),
        ("tree_mask", {"features": frozenset({"tree_mask"})}),
    ):  # fmt: skip
        assert any(word in reason for reason in TritonAttention.unsupported(need(**changes)))
    latent = {"kind": "mla", "head_size": 576, "rope_size": 64, "num_kv_heads": 1}
    for capability, dtype, words in (
        ((8, 0), "bfloat16", ""),
        ((8, 0), "float8_e4m3fn", "fp8 needs compute capability 8.9 or later, the GPU has 8.0"),
        ((7, 5), "bfloat16", "needs compute capability 8.0 or later, the GPU has 7.5"),
    ):  # fmt: skip
        monkeypatch.setattr(attention_reasons, "machine", lambda found=capability: SimpleNamespace(capability=found))
        asked = need(kv_dtype=dtype), need(kv_dtype=dtype, **latent)
        for reasons in (TritonAttention.unsupported(asked[0]), TritonLatentAttention.unsupported(asked[1])):
            assert len(reasons) == bool(words) and all(words in reason for reason in reasons)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (reason,) = TritonAttention.unsupported(need(device="cpu"))
    assert "needs a GPU" in reason
