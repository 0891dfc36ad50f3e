"""Rows, inputs and elements by native code, against the reference driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import DTYPES, LEVELS, REFERENCE, check, driver, random

from engine.interfaces.ops import StepInputs, StepTables


@pytest.fixture(scope="module", params=LEVELS)
def ops(request: pytest.FixtureRequest, native: Any) -> Any:
    if request.param not in native.levels():
        pytest.skip(f"this processor, or the compiler, has no {request.param}")
    return driver(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_gathers(ops: Any, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    """Equal bit by bit, of dense rows and of rows cut out of wider ones."""
    wide = random(90, 130, dtype=dtype)
    for x in (wide, wide[:, 3:77], wide.T):
        for index in ([], [0], [5, 5, 89, 0], list(range(80))):
            ids = torch.tensor(index, dtype=index_dtype)
            assert torch.equal(ops.embedding(ids, x), x[ids.long()])
            assert torch.equal(ops.gather_rows(x, ids), x[ids.long()])
            assert torch.equal(ops.embedding_part(ids, x, 40), REFERENCE.embedding_part(ids.long(), x, 40))


def test_a_row_that_is_not_there(ops: Any) -> None:
    with pytest.raises(IndexError, match="row 7 of 7"):
        ops.embedding(torch.tensor([1, 7]), torch.zeros(7, 4))
    with pytest.raises(IndexError, match="row -1 of 7"):
        ops.gather_rows(torch.zeros(7, 4), torch.tensor([-1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements(ops: Any, dtype: torch.dtype) -> None:
    """Over the range where the functions bend, and far beyond it."""
    x = torch.cat((torch.linspace(-9, 9, 3001), torch.tensor([-1e30, -200.0, 200.0, 1e30, 0.0, -0.0]))).to(dtype)
    y = random(len(x), dtype=dtype)
    assert torch.equal(ops.add(x, y), x + y)
    assert torch.equal(ops.scale(x, 0.37), (x.float() * 0.37).to(dtype))
    for cap in (0.5, 1.0, 30.0):
        check(ops.soft_cap(x, cap), REFERENCE.soft_cap(x.double(), cap), dtype, cap * 0.1)
    for tanh in (False, True):
        check(ops.gelu(x[:-4], tanh), REFERENCE.gelu(x[:-4].double(), tanh), dtype, 0.5)
        assert ops.gelu(x[-4:], tanh).tolist() == [200.0, x[-3].item(), 0.0, 0.0]
    spread = random(7, 40, dtype=dtype)
    assert torch.equal(ops.add(spread.T, spread.T), (spread + spread).T)


def test_soft_cap_keeps_small_logits(ops: Any) -> None:
    x = torch.logspace(-30, 0, 200)
    torch.testing.assert_close(ops.soft_cap(x, 30.0), REFERENCE.soft_cap(x.double(), 30.0).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 31, 96, 1000])
def test_layer_norm(ops: Any, dtype: torch.dtype, size: int) -> None:
    x = random(5, 3, size, dtype=dtype, scale=3) + 10
    weight, bias = random(size, dtype=dtype, seed=1), random(size, dtype=dtype, seed=2)
    expected = REFERENCE.layer_norm(x.double(), weight.double(), bias.double(), 1e-5)
    check(ops.layer_norm(x, weight, bias, 1e-5), expected, dtype, 3.0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_prepare_inputs(native: Any, data: st.DataObject) -> None:
    """Rows of any lengths, padding rows and tokens, several groups: equal to the reference, nothing else touched."""
    slots, length = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    num_tokens = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    rows, padding = len(num_tokens), data.draw(st.integers(0, 4))
    total, generator = sum(num_tokens) + padding, np.random.default_rng(data.draw(st.integers(0, 99)))
    per_block = data.draw(st.lists(st.sampled_from([1, 4, 7]), min_size=0, max_size=3))
    blocks = tuple(
        torch.from_numpy(generator.integers(0, 900, (slots, 12 + length // size), dtype=np.int32)) for size in per_block
    )
    tables = StepTables(
        torch.from_numpy(generator.integers(0, 999, (slots, length + 10), dtype=np.int32)), blocks, tuple(per_block)
    )

    def made() -> StepInputs:
        start = np.cumsum([0, *num_tokens]).astype(np.int32)
        wide = torch.full((9, total + 3), -5, dtype=torch.int64)
        return StepInputs(
            slot_of_row=slot_of_row,
            num_computed=computed,
            query_start_loc=torch.from_numpy(start),
            seq_lens=computed + torch.tensor(num_tokens, dtype=torch.int32),
            token_ids=torch.full((total + 3,), -5, dtype=torch.int32)[:total],
            positions=wide[0, :total],
            block_tables=tuple(torch.full((rows + 2, b.shape[1]), -5, dtype=torch.int32)[:rows] for b in blocks),
            slot_mappings=tuple(wide[1 + i, :total] for i in range(len(blocks))),
        )

    slot_of_row = torch.from_numpy(generator.integers(0, slots, rows, dtype=np.int32))
    computed = torch.from_numpy(generator.integers(0, length, rows, dtype=np.int32))
    found, expected = made(), made()
    driver("scalar").prepare_inputs(tables, found)
    REFERENCE.prepare_inputs(tables, expected)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (ours, theirs)), strict=True):
            assert torch.equal(a, b)
            assert a.untyped_storage().tolist() == b.untyped_storage().tolist()
