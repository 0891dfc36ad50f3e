"""The reference attention against dense float64, over paged pools in which all that must not be read is NaN."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import Case, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.attention import AttentionNeed
from engine.interfaces.context import WorkerContext
from engine_reference.attention_torch import attention as body_module
from engine_reference.attention_torch import plan as plan_module
from engine_reference.attention_torch.attention import TorchAttentionBody
from engine_reference.attention_torch.card import TorchAttention, TorchLatentAttention


def check(case: Case, tolerance: float = 1e-13) -> None:
    out, lse = case.run()
    expected, expected_lse = case.expected()
    real = len(expected)
    np.testing.assert_allclose(out[:real].double().numpy(), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse[:real].double().numpy(), expected_lse, rtol=tolerance, atol=tolerance)
    assert out.isfinite().all() and lse.isfinite().all()


shapes = st.builds(
    Shape,
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 5]),
    size=st.sampled_from([1, 4, 6, 10]),
    block=st.sampled_from([1, 2, 4, 7, 16]),
    window=st.sampled_from([None, None, 1, 2, 3, 5, 16, 100]),
    cap=st.sampled_from([None, 0.5, 20.0]),
    layers=st.just(2),
    spare_bytes=st.sampled_from([0, 64]),
    sinks=st.booleans(),
    alibi=st.booleans(),
)


@st.composite
def batches(draw: st.DrawFn) -> dict:
    """Decode rows, then rows of any number of queries, contiguous or not."""
    decodes = [[n] for n in draw(st.lists(st.integers(0, 60), max_size=5))]
    others = []
    for _ in range(draw(st.integers(0 if decodes else 1, 3))):
        if draw(st.booleans()):
            start = draw(st.integers(0, 40))
            others.append(list(range(start, start + draw(st.integers(1, 20)))))
        else:
            others.append(sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=8))))
    return {
        "rows": decodes + others,
        "num_decodes": len(decodes),
        "seed": draw(st.integers(0, 2**32)),
        "padding": draw(st.sampled_from([0, 0, 3])),
        "bound": draw(st.sampled_from([0, 0, 4])),
    }


@given(shapes, batches(), st.booleans())
@settings(max_examples=120, deadline=None)
def test_ragged_batches(shape: Shape, batch: dict, small_chunks: bool) -> None:
    """All shapes at once; also with limits so low that decode rows and prefills are cut into chunks."""
    with pytest.MonkeyPatch.context() as patch:
        if small_chunks:
            patch.setattr(plan_module, "MAX_GATHERED", shape.heads * shape.size * 40)
            patch.setattr(body_module, "MAX_SCORES", shape.heads * shape.group * 100)
        check(Case(shape, **batch))


@pytest.mark.parametrize("size", [32, 48, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_sizes_and_dtypes(dtype: torch.dtype, size: int) -> None:
    """Low precision is computed in float32: only the result is rounded."""
    shape = Shape(heads=2, group=4, size=size, block=16, dtype=dtype)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    check(Case(shape, [[70], [3], list(range(10, 50))], num_decodes=2), rounding)


@given(shapes, batches(), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
@settings(max_examples=40, deadline=None)
def test_a_narrower_cache_rounds_keys_and_values_and_nothing_else(
    shape: Shape, batch: dict, cache_dtype: torch.dtype
) -> None:
    """Exact in float64 against a reference whose keys and values are rounded as the cache rounds them."""
    check(Case(replace(shape, cache_dtype=cache_dtype, spare_bytes=64), **batch))


@given(shapes, batches())
@settings(max_examples=40, deadline=None)
def test_alone_and_batched(shape: Shape, batch: dict) -> None:
    """A row's result does not depend on its neighbours, nor on whether it counts as a decode."""
    case = Case(shape, **batch)
    out, _ = case.run()
    start = 0
    for r, row in enumerate(case.rows):
        alone = Case(shape, [row], num_decodes=0, seed=1)
        alone.k = [case.k[r]]
        alone.v = [case.v[r]]
        alone.q = case.q[start : start + len(row)]
        alone.new_k = case.new_k[start : start + len(row)]
        alone.new_v = case.new_v[start : start + len(row)]
        slots, keys, values = alone.old
        table = alone.batch.block_table[0].tolist()
        for i, slot in enumerate(slots):
            position = table.index(slot // shape.block) * shape.block + slot % shape.block
            keys[i], values[i] = case.k[r][position], case.v[r][position]
        torch.testing.assert_close(alone.run()[0], out[start : start + len(row)], rtol=1e-13, atol=1e-13)
        start += len(row)


def test_refilled_plan_is_the_same_object() -> None:
    shape = Shape()
    first, second = Case(shape, [[5], [9]], 2), Case(shape, [[6], [30]], 2, seed=3)
    body = TorchAttentionBody(WorkerContext(start=None, dtype=torch.float64))  # type: ignore[arg-type]
    plan = body.plan(first.batch, first.group)
    assert body.plan(second.batch, second.group, plan) is plan
    assert plan.decodes[0].num_keys == 31


def test_writes_stay_in_their_layer() -> None:
    """The other layers' bytes and the page's spare bytes are untouched."""
    case = Case(Shape(layers=3), [[5], list(range(7))], 1)
    before = case.pool.clone()
    case.run()
    changed = (before != case.pool).any(dim=0).nonzero().squeeze(1)
    layer = case.group.layer_bytes
    assert len(changed) and changed.min() >= layer and changed.max() < 2 * layer


def need(**changes: object) -> AttentionNeed:
    facts = {
        "kind": "full", "head_size": 8, "num_q_heads": 2, "num_kv_heads": 2, "dtype": "float32", "kv_dtype": "float32",
        "device": "cpu", "block_size": 16,
    }  # fmt: skip
    return AttentionNeed(**{**facts, **changes})  # type: ignore[arg-type]


def test_card() -> None:
    assert TorchAttention.unsupported(need(head_size=77, soft_cap=3.0, features=frozenset({"kv_index"}))) == []
    assert TorchAttention.unsupported(need(kind="sliding", sliding_window=5)) == []
    reasons = TorchAttention.unsupported(
        need(kind="mla", dtype="int8", kv_dtype="fp8", features=frozenset({"tree_mask"}))
    )
    assert len(reasons) == 4
    assert TorchAttention.tokens_per_page(need()) == 16
    assert TorchAttention.unsupported(need(kv_dtype="bfloat16")) == []
    for dtype, kv_dtype in (("float32", "float64"), ("bfloat16", "float32"), ("bfloat16", "float16")):
        (reason,) = TorchAttention.unsupported(need(dtype=dtype, kv_dtype=kv_dtype))
        assert reason == f"a cache of {kv_dtype} under queries of {dtype} saves no memory"


def test_a_cache_of_whole_numbers_is_the_processors() -> None:
    for kv_dtype in ("int8", "float8_e4m3fn"):
        assert TorchAttention.unsupported(need(kv_dtype=kv_dtype)) == []
        assert TorchAttention.unsupported(need(kind="encoder", kv_dtype=kv_dtype)) == []
        assert TorchAttention.scale_bytes(need(kv_dtype=kv_dtype)) == 2
        assert TorchAttention.scale_bytes(need(kind="encoder", kv_dtype=kv_dtype)) == 0
    assert TorchAttention.scale_bytes(need()) == TorchAttention.scale_bytes(need(kv_dtype="bfloat16")) == 0
    assert TorchAttention.scale_bytes(need(kv_dtype="float8_e4m3fn", device="cuda")) == 0
    (reason,) = TorchAttention.unsupported(need(kv_dtype="int8", device="cuda:0"))
    assert "a cache of int8 is not served on cuda:0" in reason
    (reason,) = TorchLatentAttention.unsupported(need(kind="mla", kv_dtype="int8"))
    assert "a cache of int8 is not served" in reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_fp8_cache(dtype: torch.dtype) -> None:
    """Keys and values have 8 bits; the rest is computed as ever."""
    shape = Shape(heads=2, group=4, size=64, block=16, dtype=dtype, cache_dtype=torch.float8_e4m3fn)
    rounding = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    check(Case(shape, [[70], [3], list(range(10, 50))], num_decodes=2), rounding)


def test_what_fp8_cannot_hold_becomes_its_largest_number() -> None:
    case = Case(Shape(dtype=torch.float32, cache_dtype=torch.float8_e4m3fn), [[0], [1]], num_decodes=2)
    body = TorchAttentionBody(WorkerContext(start=None))  # type: ignore[arg-type]
    cache, plan = body.cache(case.need, case.group, case.pages), body.plan(case.batch, case.group)
    values = torch.full((2, 2, 8), 1e6)
    values[0, 0, :3] = torch.tensor([-torch.inf, torch.nan, 0.3])
    body.write(case.layer, values, torch.where(values.isnan(), 0, -values), cache, plan)
    page, offset = divmod(int(case.batch.slot_mapping[0]), case.shape.block)
    found = cache.k[page, 0, offset].float()
    assert found[1].isnan() and found[[0, 2, 3]].tolist() == [-448, 0.3125, 448]
    assert cache.v[page, 1, offset].float().tolist() == [-448] * 8
