"""Native sampling against its meaning in float64 and against the reference driver, at every level."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.ops import SamplingRows
from engine_kit import philox
from engine_reference.ops_torch.ops import TorchOpsBody

card = pytest.importorskip("engine_cpu.ops_cpu.card", reason="engine-cpu is not installed")

REFERENCE = TorchOpsBody(None)  # type: ignore[arg-type]
LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_bf16")
Row = tuple[float, int, float, float]


@pytest.fixture(scope="module", params=LEVELS)
def ops(request: pytest.FixtureRequest) -> Any:
    """The driver, forced to one level; skipped where the processor has not got it."""
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    if request.param not in native.levels():
        pytest.skip(f"this processor, or the compiler, has no {request.param}")
    from engine_cpu.ops_cpu.body import CpuOpsBody

    return CpuOpsBody(SimpleNamespace(options=card.CpuOpsOptions(level=request.param)))  # type: ignore[arg-type]


def rows_of(chosen: list[Row], seeds: list[int], positions: list[int]) -> SamplingRows:
    temperature, top_k, top_p, min_p = zip(*chosen, strict=True)
    return SamplingRows(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p, dtype=torch.float32),
        min_p=torch.tensor(min_p, dtype=torch.float32),
        seed=torch.from_numpy(np.array(seeds, np.uint64).astype(np.int64)),
        position=torch.tensor(positions),
    )


def meaning(logits: np.ndarray, row: Row) -> tuple[np.ndarray, float]:
    """The probabilities of one row [V] in float64, and how near a filter comes to deciding otherwise, relatively."""
    temperature, top_k, top_p, min_p = row
    x = logits.astype(np.float64)
    weight = np.exp((x - x.max()) / np.float64(np.float32(temperature)))
    floor = np.float64(np.float32(min_p))
    margin = np.abs(weight / floor - 1).min() if floor else 1.0
    kept = weight >= floor
    if 0 < top_k < len(x):
        kept &= x >= np.sort(x)[::-1][top_k - 1]
    weight = np.where(kept, weight, 0)
    if top_p < 1:
        order = np.lexsort((np.arange(len(x)), -np.where(kept, x, -np.inf)))
        running = np.cumsum(weight[order])
        goal = np.float64(np.float32(top_p)) * weight.sum()
        margin = min(margin, np.abs(running / goal - 1).min())
        weight[order[int(np.searchsorted(running, goal)) + 1 :]] = 0
    return weight / weight.sum(), float(margin)


settings_of_a_row = st.tuples(
    st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 5, 40, 1000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@given(
    st.lists(settings_of_a_row, min_size=1, max_size=6),
    st.one_of(st.integers(1, 70), st.integers(500, 3000)),
    st.integers(0, 2**32),
    st.sampled_from([None, 1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_draws(ops: Any, chosen: list[Row], vocab: int, seed: int, decimals: int | None) -> None:
    """float32 logits, rounded ones with ties; the token that the random number falls on, unless it falls within
    rounding of another one or a filter is within rounding of deciding otherwise."""
    generator = np.random.default_rng(seed)
    logits = (generator.normal(size=(len(chosen), vocab)) * 3).astype(np.float32)
    if decimals is not None:
        logits = np.round(logits, decimals - 1)
    seeds, positions = generator.integers(0, 2**63, len(chosen)).tolist(), generator.integers(0, 5000, len(chosen))
    rows = rows_of(chosen, seeds, positions.tolist())
    before = torch.from_numpy(logits.copy())
    drawn = ops.sample(before, rows)
    assert drawn.dtype == torch.int32 and torch.equal(before, torch.from_numpy(logits))
    for i, (row, token) in enumerate(zip(chosen, drawn.tolist(), strict=True)):
        if row[0] == 0:
            assert token == int(np.argmax(logits[i]))
            continue
        p, margin = meaning(logits[i], row)
        if margin < 1e-5 and row[3] != 1.0:  # of weights equal to the largest, min_p 1 keeps all
            continue
        running = np.cumsum(p)
        u = philox.uniform(np.array([seeds[i]], np.uint64), positions[i : i + 1], 0)[0]
        nearest = set((np.searchsorted(running, [u - 2e-6, u, u + 2e-6], side="right")).clip(max=vocab - 1).tolist())
        assert token in nearest and p[token] > 0, (i, row)
        alone = ops.sample(torch.from_numpy(logits[i : i + 1].copy()), SamplingRows(*(f[i : i + 1] for f in rows)))
        assert alone.tolist() == [token]


@pytest.mark.parametrize("row", [(1.0, 0, 1.0, 0.0), (0.8, 50, 0.95, 0.0), (1.2, 0, 0.9, 0.0), (0.7, 20, 1.0, 0.05)])
def test_the_reference_driver_draws_the_same(ops: Any, row: Row) -> None:
    """Over a large vocabulary, in float32: 400 draws, of which rounding may decide one or two."""
    assert (ops.sample(*many_draws(row)) != drawn_by_reference(row)).sum() <= 2


def many_draws(row: Row) -> tuple[torch.Tensor, SamplingRows]:
    logits = torch.randn(400, 32_000, generator=torch.Generator().manual_seed(3)) * 4
    return logits, rows_of([row] * 400, [11] * 400, list(range(400)))


@functools.cache  # for all levels of the processor
def drawn_by_reference(row: Row) -> torch.Tensor:
    return REFERENCE.sample(*many_draws(row))


def test_logits_of_16_bits_are_drawn_from_as_they_are(ops: Any) -> None:
    """What is drawn from them in float32; and no such copy, which the start's memory profile would not see, is kept."""
    logits = torch.randn(64, 3000).bfloat16()
    rows = rows_of([(0.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.1)] * 32, list(range(64)), [3] * 64)
    tokens, broken = ops.draw(logits, rows)
    assert torch.equal(tokens, ops.sample(logits.float(), rows)) and not broken.any()
    held = [one for one in vars(ops).values() if isinstance(one, torch.Tensor)]
    assert sum(one.numel() for one in held) < 3000


def test_draws_follow_the_distribution(ops: Any) -> None:
    """Chi-square over 20,000 draws; tokens outside the filters never come."""
    logits, n = np.random.default_rng(3).normal(size=24).astype(np.float32) * 0.8, 20_000
    for row in ((1.0, 0, 1.0, 0.0), (2.0, 6, 0.7, 0.02)):
        drawn = ops.sample(torch.from_numpy(np.tile(logits, (n, 1))), rows_of([row] * n, [7] * n, list(range(n))))
        p, _ = meaning(logits, row)
        count = np.bincount(drawn.numpy(), minlength=24)
        assert not count[p == 0].any()
        seen = p > 0
        assert ((count[seen] - n * p[seen]) ** 2 / (n * p[seen])).sum() < 60


def test_a_flat_distribution(ops: Any) -> None:
    """All equal: the cut is within one bin, and within equals, where lower ids go first."""
    n = 5000
    logits = torch.zeros(3, n)
    rows = rows_of([(1.0, 0, 0.5, 0.0), (1.0, 7, 1.0, 0.0), (1.0, 7, 0.1, 0.0)], [1, 2, 3], [0, 0, 0])
    for i in range(200):
        token = ops.sample(logits, rows._replace(position=torch.full((3,), i))).tolist()
        assert token[0] < n / 2 and token[2] < n / 10
        u = [philox.uniform(np.array([seed], np.uint64), np.array([i]), 0)[0] for seed in (1, 2, 3)]
        for found, share, number in zip(token, (0.5, 1, 0.1), u, strict=True):
            assert abs(found - int(number * n * share)) <= 1


def test_extremes(ops: Any) -> None:
    """Masked tokens are not drawn; tiny temperatures are greedy; what is not a number gives a token all the same."""
    logits = torch.full((6, 100), -torch.inf)
    logits[0, 17] = 3.0
    logits[1] = torch.arange(100.0)
    logits[2, [4, 9]] = torch.tensor([1e30, 1e30])
    logits[3] = torch.nan
    tiny = float(np.finfo(np.float32).tiny)
    rows = [(1.0, 5, 0.9, 0.1), (tiny, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 3, 0.5, 0.0), (1.0, 0, 0.5, 0.0)]
    for position in range(30):
        logits[4] = torch.randn(100, generator=torch.Generator().manual_seed(position)) * 3
        logits[4, 50] = torch.nan
        drawn = ops.sample(logits, rows_of([*rows, (1.0, 0, 0.9, 0.2)], [5] * 6, [position] * 6)).tolist()
        assert drawn[:3] == [17, 99, 4] and all(0 <= token < 100 for token in drawn)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_random_numbers(native: Any, seed: int, position: int, purpose: int) -> None:
    bits = int(np.uint64(seed).astype(np.int64))
    expected = philox.uniform(np.array([seed], np.uint64), np.array([position]), purpose)[0]
    assert native.uniform(bits, position, purpose) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 100, 4097])
def test_logprobs(ops: Any, dtype: torch.dtype, vocab: int) -> None:
    """Against the reference in float64; of equals the lower id, which bfloat16 has many of."""
    logits = (torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    logits[2, 1:] = -torch.inf
    tokens = torch.tensor([0, vocab - 1, 0, 1, 2], dtype=torch.int32)
    for k in (0, 1, min(20, vocab)):
        chosen, rank, ids, values = ops.logprobs(logits, tokens, k)
        wanted = REFERENCE.logprobs(logits.double(), tokens, k)
        torch.testing.assert_close(chosen, wanted[0], rtol=1e-6, atol=2e-6)
        assert torch.equal(rank, wanted[1]) and (chosen.dtype, rank.dtype) == (torch.float32, torch.int32)
        torch.testing.assert_close(values, wanted[3], rtol=1e-6, atol=2e-6)
        assert ids.dtype == torch.int32 and ids.shape == (5, k)
        for row in range(5):
            order = sorted(range(vocab), key=lambda t: (-float(logits[row, t]), t))
            assert ids[row].tolist() == order[:k]


def test_penalties(ops: Any) -> None:
    """Two calls: nothing of one row, or of the call before, is left for another."""
    generator = torch.Generator().manual_seed(1)
    for vocab in (40, 300):
        logits = torch.randn(6, vocab, generator=generator) * 3
        rows, tokens = torch.tensor([4, 0, 2, 5]), torch.randint(0, vocab, (4, 60), generator=generator).int()
        tokens[:, 50:] = 2_000_000  # what lies past the known tokens may be anything
        prompt, known = torch.tensor([0, 10, 50, 7]), torch.tensor([20, 50, 50, 7])
        presence, frequency = torch.tensor([0.5, -1, 0, 2]), torch.tensor([0.1, 0, 0.7, 2])
        repetition = torch.tensor([1.0, 1.3, 0.5, 2.0])
        expected, narrow = logits.double(), logits.bfloat16()
        for target, driver in ((expected, REFERENCE), (logits, ops), (narrow, ops)):
            driver.penalties(target, rows, tokens, prompt, known, presence, frequency, repetition)
        torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(narrow.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("vocab", [31, 32, 1000])
def test_bitmasks(ops: Any, vocab: int) -> None:
    """Equal to the reference, also where a row is left without a finite logit."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, vocab, generator=generator)
    bits = torch.randint(-(2**31), 2**31 - 1, (3, -(-vocab // 32)), generator=generator).int()
    bits[1] = 0
    logits[4, : vocab // 2] = -torch.inf
    rows, expected = torch.tensor([4, 0, 2]), logits.clone()
    REFERENCE.apply_bitmask(expected, rows, bits)
    ops.apply_bitmask(logits, rows, bits)
    assert torch.equal(logits, expected)
