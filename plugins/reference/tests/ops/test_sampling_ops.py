"""The draw, penalties and log probabilities against their definition in numpy."""

import definition
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.ops import SamplingRows
from engine_kit import philox
from engine_reference.ops_torch import common
from engine_reference.ops_torch import drawing as drawing_module
from engine_reference.ops_torch import philox as torch_philox
from engine_reference.ops_torch.ops import TorchOpsBody

OPS = TorchOpsBody(None)  # type: ignore[arg-type]
GREEDY = (0.0, 0, 1.0, 0.0)


def rows_of(settings_: list[tuple[float, int, float, float]], seeds: list[int], positions: list[int]) -> SamplingRows:
    temperature, top_k, top_p, min_p = zip(*settings_, strict=True)
    return SamplingRows(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p, dtype=torch.float32),
        min_p=torch.tensor(min_p, dtype=torch.float32),
        seed=torch.from_numpy(np.array(seeds, np.uint64).astype(np.int64)),
        position=torch.tensor(positions),
    )


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=20),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=50, deadline=None)
def test_philox_equals_the_definition(numbers: list[tuple[int, int]], purpose: int) -> None:
    seed, position = np.array([n[0] for n in numbers], np.uint64), np.array([n[1] for n in numbers], np.int64)
    drawn = torch_philox.uniform(torch.from_numpy(seed.astype(np.int64)), torch.from_numpy(position), purpose)
    assert np.array_equal(drawn.numpy(), philox.uniform(seed, position, purpose))


def test_philox_known_answer() -> None:
    """Random123's own test vectors."""
    ones, pi = [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    answers = philox.philox4x32(
        np.array([[0] * 4, ones, pi], np.uint64), np.array([[0, 0], ones[:2], [0xA4093822, 0x299F31D0]], np.uint64)
    )
    assert answers.tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


settings_of_a_row = st.tuples(
    st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 5, 40, 1000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@given(
    st.lists(settings_of_a_row, min_size=1, max_size=6),
    st.integers(1, 700),
    st.integers(0, 2**32),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([drawing_module._FIRST_CANDIDATES, 4]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_sample_equals_the_definition(
    chosen: list[tuple[float, int, float, float]],
    vocab: int,
    seed: int,
    decimals: int | None,
    candidates: int,
    asks: bool,
) -> None:
    """float64; rounded logits make ties; mixed rows; alone and batched; and as on a device that is not to be asked."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(len(chosen), vocab)) * 3
    if decimals is not None:
        logits = np.round(logits, decimals - 1)
    seeds, positions = generator.integers(0, 2**63, len(chosen)).tolist(), generator.integers(0, 5000, len(chosen))
    rows = rows_of(chosen, seeds, positions.tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing_module, "_FIRST_CANDIDATES", candidates)
        patch.setattr(common, "may_ask", lambda tensor: asks)
        batched = OPS.sample(torch.from_numpy(logits.copy()), rows)
        assert batched.dtype == torch.int32
        expected = [
            definition.sample(logits[i], *chosen[i], seed=seeds[i], position=positions[i]) for i in range(len(chosen))
        ]
        assert batched.tolist() == expected
        for i in range(len(chosen)):
            alone = OPS.sample(torch.from_numpy(logits[i : i + 1].copy()), SamplingRows(*(f[i : i + 1] for f in rows)))
            assert alone.tolist() == expected[i : i + 1]


@pytest.mark.parametrize(
    "chosen",
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 0.8, 0.0), (1.5, 5, 1.0, 0.0), (1.0, 0, 1.0, 0.15), (2.0, 6, 0.7, 0.02)],
    ids=str,
)
def test_sample_follows_the_distribution(chosen: tuple[float, int, float, float]) -> None:
    """Chi-square over 20,000 draws in float32; tokens outside the filters never come."""
    logits = np.random.default_rng(3).normal(size=24).astype(np.float32) * 0.8
    n = 20_000
    drawn = OPS.sample(
        torch.from_numpy(np.tile(logits, (n, 1))),
        rows_of([chosen] * n, [7] * (n // 2) + [8] * (n // 2), [*range(n // 2)] * 2),
    )
    p = definition.distribution(logits, *chosen)
    count = np.bincount(drawn.numpy(), minlength=24)
    assert not count[p == 0].any()
    kept = p > 0
    statistic = ((count - n * p)[kept] ** 2 / (n * p)[kept]).sum()
    degrees = kept.sum() - 1
    assert degrees >= 2
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def draws(logits: list[float], chosen: tuple[float, int, float, float], n: int = 400) -> set[int]:
    rows = rows_of([chosen] * n, [1] * n, list(range(n)))
    return set(OPS.sample(torch.tensor([logits] * n, dtype=torch.float64), rows).tolist())


def test_ties() -> None:
    equal = [1.0, 1.0, 1.0, 1.0]
    assert draws(equal, GREEDY) == {0}
    assert draws([0.0, *equal], (1.0, 2, 1.0, 0.0)) == {1, 2, 3, 4}, "those equal to the k-th stay"
    assert draws(equal, (1.0, 0, 0.5, 0.0)) == {0, 1}, "0.25 + 0.25 reaches 0.5; lower ids go first"
    assert draws(equal, (1.0, 0, 0.51, 0.0)) == {0, 1, 2}
    assert draws(equal, (1.0, 0, 1e-6, 0.0)) == {0}, "at least one"
    assert draws([5.0, *equal], (1.0, 0, 1.0, 1.0)) == {0}
    assert draws(equal, (1.0, 0, 1.0, 1.0)) == {0, 1, 2, 3}, "none is less likely than the most likely"


def test_extremes() -> None:
    assert draws([1.0, 1.0 + 1e-9, -3e38], (1e-30, 0, 1.0, 0.0)) == {1}, "a tiny temperature does not overflow"
    assert draws([0.0, -np.inf, 0.0], (1.0, 0, 0.999, 0.0)) == {0, 2}, "masked tokens never come"
    assert draws([-1e30, -np.inf, -np.inf], (100.0, 2, 0.5, 0.5)) == {0}
    assert draws([3.0], (1.0, 1, 0.5, 0.5)) == {0}
    broken = OPS.sample(torch.full((2, 5), torch.nan), rows_of([(1.0, 0, 1.0, 0.0), GREEDY], [1, 2], [0, 0]))
    assert all(0 <= token < 5 for token in broken.tolist()), "whatever comes in, a token of the vocabulary comes out"


@given(st.integers(0, 2**32), st.integers(1, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_penalties_equal_the_definition(seed: int, num_rows: int, half: bool) -> None:
    generator = np.random.default_rng(seed)
    vocab, length = 30, 12
    logits = generator.normal(size=(num_rows + 2, vocab)) * 2
    logits[0, 3] = -np.inf
    rows = generator.permutation(num_rows + 2)[:num_rows]
    tokens = generator.integers(0, vocab, (num_rows, length))
    num_tokens = generator.integers(1, length + 1, num_rows)
    num_prompt = np.minimum(generator.integers(1, length + 1, num_rows), num_tokens)
    presence, frequency = generator.uniform(-2, 2, (2, num_rows)).astype(np.float32)
    repetition = generator.uniform(0.5, 2, num_rows).astype(np.float32)
    given_ids = tokens.copy()
    for i in range(num_rows):
        given_ids[i, num_tokens[i] :] = 10**6  # whatever lies past the known tokens
    dtype = torch.float32 if half else torch.float64
    actual = torch.from_numpy(logits.copy()).to(dtype)
    OPS.penalties(
        actual,
        *(torch.from_numpy(a) for a in (rows, given_ids.astype(np.int32), num_prompt, num_tokens)),
        *(torch.from_numpy(a) for a in (presence, frequency, repetition)),
    )
    for i, row in enumerate(rows):
        known = tokens[i, : num_tokens[i]].tolist()
        logits[row] = definition.penalise(
            logits[row], known[: num_prompt[i]], known[num_prompt[i] :], presence[i], frequency[i], repetition[i]
        )
    np.testing.assert_allclose(actual.numpy(), logits, rtol=1e-5 if half else 1e-13, atol=1e-5 if half else 1e-13)


def test_mask_tokens() -> None:
    logits = torch.zeros(2, 4)
    OPS.mask_tokens(logits, torch.tensor([0, 0, 1]), torch.tensor([1, 3, 0]))
    assert logits.isneginf().tolist() == [[False, True, False, True], [True, False, False, False]]


@given(vocab=st.integers(1, 100), num_rows=st.integers(1, 6), half=st.booleans(), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_apply_bitmask(vocab: int, num_rows: int, half: bool, seed: int) -> None:
    """Rows that are not named stay; bits past the vocabulary mean nothing; a row that is left without a finite logit
    draws what its mask forbids."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(num_rows + 2, vocab))
    logits[generator.random(logits.shape) < 0.3] = -np.inf
    rows = generator.permutation(num_rows + 2)[:num_rows]
    allowed = generator.random((num_rows, -(-vocab // 32) * 32)) < generator.choice([0.0, 0.1, 0.5, 1.0])
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    actual = torch.from_numpy(logits).to(torch.float32 if half else torch.float64)
    expected = actual.clone().numpy()
    OPS.apply_bitmask(actual, torch.from_numpy(rows), torch.from_numpy(bits))
    for row, may in zip(rows, allowed[:, :vocab], strict=True):
        expected[row, ~may] = -np.inf
        if (expected[row] == -np.inf).all():
            expected[row, ~may] = 0
    np.testing.assert_array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs(k: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 20, dtype=dtype, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = logits[1, 9] = 9.0
    tokens = torch.tensor([2, 9, 19], dtype=torch.int32)
    chosen, rank, top_ids, top_values = OPS.logprobs(logits, tokens, k)
    assert (chosen.dtype, rank.dtype, top_ids.dtype, top_values.dtype) == (
        torch.float32, torch.int32, torch.int32, torch.float32,
    )  # fmt: skip
    exact = logits.double().numpy()
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen.numpy(), exact[range(3), tokens.numpy()], rtol=1e-5)
    assert rank.tolist() == [
        int((row > row[token]).sum()) + 1 for row, token in zip(exact, tokens.tolist(), strict=True)
    ]
    assert rank[1] == 1
    assert top_ids.shape == top_values.shape == (3, k)
    np.testing.assert_allclose(top_values.numpy(), -np.sort(-exact, axis=1)[:, :k], rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(exact, top_ids.numpy(), axis=1), top_values.numpy(), rtol=1e-5)
