"""Each operation of a model's layers against plain numpy in float64."""

import math

import numpy as np
import pytest
import torch

from engine.interfaces.ops import OPERATIONS, OpsNeed, StepInputs, StepTables
from engine_reference.ops_torch.card import TorchOps
from engine_reference.ops_torch.ops import TorchOpsBody

OPS = TorchOpsBody(None)  # type: ignore[arg-type]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(actual: torch.Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=tolerance, atol=tolerance)


def plain(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def test_every_operation_is_there() -> None:
    assert TorchOps.operations == set(OPERATIONS)
    assert all(callable(getattr(OPS, name)) for name in OPERATIONS)


def test_card_says_what_it_cannot_do() -> None:
    assert TorchOps.unsupported(OpsNeed(operation="linear", dtype="bfloat16", device="cpu")) == []
    reasons = TorchOps.unsupported(OpsNeed(operation="fly", dtype="int3", device="cpu"))
    assert len(reasons) == 2 and "fly" in reasons[0] and "int3" in reasons[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise(dtype: torch.dtype) -> None:
    a, b = random(5, 8, dtype=dtype), random(5, 8, dtype=dtype, seed=1)
    check(OPS.add(a, b), plain(a) + plain(b), dtype)
    check(OPS.scale(a, 0.3), plain(a) * 0.3, dtype)
    check(OPS.soft_cap(a, 0.7), 0.7 * np.tanh(plain(a) / 0.7), dtype)
    gate, up = plain(a)[:, :4], plain(a)[:, 4:]
    check(OPS.silu_mul(a), gate / (1 + np.exp(-gate)) * up, dtype)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows(index: torch.dtype) -> None:
    weight, ids = random(9, 4), torch.tensor([8, 0, 0, 3], dtype=index)
    assert torch.equal(OPS.embedding(ids, weight), weight[ids.long()])
    assert torch.equal(OPS.gather_rows(weight, ids), weight[ids.long()])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("first", "last"), [(0, 9), (0, 3), (3, 8), (8, 9)])
def test_parts_of_an_embedding_add_up(index: torch.dtype, first: int, last: int) -> None:
    """Zeros where another rank has the row; not a number there is no matter of this rank's either."""
    weight, ids = random(9, 4), torch.tensor([8, 0, 0, 3, 7, 2], dtype=index)
    inside = ((ids >= first) & (ids < last))[:, None]
    expected = torch.where(inside, weight[ids.long()], torch.zeros(()))
    assert torch.equal(OPS.embedding_part(ids, weight[first:last].clone(), first), expected)
    broken = torch.full_like(weight[first:last], torch.nan)
    assert torch.equal(OPS.embedding_part(ids, broken, first).isnan(), inside.expand(-1, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight = (random(3, 2, 16, dtype=dtype, seed=seed) for seed in range(3))

    def norm(value: np.ndarray) -> np.ndarray:
        return value / np.sqrt((value**2).mean(-1, keepdims=True) + 1e-5) * plain(weight[0, 0])

    check(OPS.rms_norm(x, weight[0, 0], 1e-5), norm(plain(x)), dtype)
    normed, total = OPS.add_rms_norm(x, residual, weight[0, 0], 1e-5)
    check(total, plain(x) + plain(residual), dtype)
    check(normed, norm(plain(x + residual)), dtype)


@pytest.mark.parametrize("eps", [1e-12, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(dtype: torch.dtype, eps: float) -> None:
    x, weight, bias = random(4, 3, 8, dtype=dtype), random(8, dtype=dtype, seed=1), random(8, dtype=dtype, seed=2)
    wide = plain(x)
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + eps)
    check(OPS.layer_norm(x, weight, bias, eps), normed * plain(weight) + plain(bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(dtype: torch.dtype) -> None:
    x = random(5, 8, dtype=dtype) * 3
    wide = plain(x)
    phi = np.vectorize(lambda value: 0.5 * (1 + math.erf(value / math.sqrt(2))))(wide)
    check(OPS.gelu(x, False), wide * phi, dtype)
    near = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    check(OPS.gelu(x, True), near, dtype)
    assert not np.allclose(wide * phi, near, atol=1e-6)


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(dtype: torch.dtype, rotary_dim: int) -> None:
    """Pairs (i, i + rotary_dim / 2) are complex numbers that turn by position * frequency."""
    q, k = random(6, 4, 8, dtype=dtype), random(6, 2, 8, dtype=dtype, seed=1)
    positions = torch.tensor([0, 1, 5, 2, 30, 7])
    half = rotary_dim // 2
    angle = torch.arange(40, dtype=torch.float64)[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    if dtype != torch.float64:
        table = table.float()
    for x, rotated in zip((q, k), OPS.rope(q, k, positions, table), strict=True):
        turn = np.exp(1j * angle[positions].numpy())[:, None]
        turned = (plain(x)[..., :half] + 1j * plain(x)[..., half:rotary_dim]) * turn
        expected = np.concatenate([turned.real, turned.imag, plain(x)[..., rotary_dim:]], axis=-1)
        check(rotated, expected, dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, bias: bool) -> None:
    x, weight, added = random(3, 8, dtype=dtype), random(5, 8, dtype=dtype, seed=1), random(5, dtype=dtype, seed=2)
    packed = OPS.pack_linear(weight, added if bias else None)
    check(OPS.linear(x, packed), plain(x) @ plain(weight).T + (plain(added) if bias else 0), dtype)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 4, 7], [9], [1]])
def test_prepare_inputs(lengths: list[int], padding: int) -> None:
    """Against a loop over rows and tokens."""
    generator = np.random.default_rng(len(lengths))
    sizes, slots, rows = (4, 6), 5, len(lengths)
    tables = StepTables(
        tokens=torch.from_numpy(generator.integers(0, 100, (slots, 41), dtype=np.int32)),
        blocks=tuple(torch.from_numpy(generator.integers(1, 50, (slots, 40 // s + 1), dtype=np.int32)) for s in sizes),
        tokens_per_block=sizes,
    )
    total = sum(lengths) + padding
    computed = generator.integers(0, 30, rows).astype(np.int32)
    slot_of_row = generator.permutation(slots)[:rows].astype(np.int32)
    inputs = StepInputs(
        slot_of_row=torch.from_numpy(slot_of_row),
        num_computed=torch.from_numpy(computed),
        query_start_loc=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        seq_lens=torch.from_numpy(computed) + torch.tensor(lengths, dtype=torch.int32),
        token_ids=torch.full((total,), -7, dtype=torch.int32),
        positions=torch.full((total,), -7),
        block_tables=tuple(torch.full((rows, t.shape[1]), -7, dtype=torch.int32) for t in tables.blocks),
        slot_mappings=tuple(torch.full((total,), -7) for _ in sizes),
    )
    OPS.prepare_inputs(tables, inputs)
    ids, positions, mappings = [], [], [[], []]
    for row, length in enumerate(lengths):
        for position in range(computed[row], computed[row] + length):
            ids.append(int(tables.tokens[slot_of_row[row], position]))
            positions.append(position)
            for group, size in enumerate(sizes):
                page = int(tables.blocks[group][slot_of_row[row], position // size])
                mappings[group].append(page * size + position % size)
    zeros = [0] * padding
    assert inputs.token_ids.tolist() == ids + zeros
    assert inputs.positions.tolist() == positions + zeros
    assert [mapping.tolist() for mapping in inputs.slot_mappings] == [mapping + zeros for mapping in mappings]
    for found, table, size in zip(inputs.block_tables, tables.blocks, sizes, strict=True):
        width = -(-int(inputs.seq_lens.max()) // size)
        assert torch.equal(found[:, :width], table[slot_of_row, :width])
        assert (found[:, width:] == -7).all(), "more is copied than a row of the step has"
