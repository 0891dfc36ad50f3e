"""Drawing tokens in JAX beside the reference operations, in torch: the same numbers, the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine.interfaces.ops import PURPOSE_ACCEPT, PURPOSE_SAMPLE
from engine.interfaces.ops import SamplingRows as TorchRows
from engine.types.plan import BROKEN
from engine_kit import philox
from engine_reference.ops_torch.ops import TorchOpsBody
from engine_tpu import sampling
from engine_tpu.buckets import drawing_sizes
from engine_tpu.sampling import Asked, Masks, SampledRows
from engine_tpu.steps import jit_draw

N, V, LENGTH = 6, 83, 40
OPS = TorchOpsBody(None)  # type: ignore[arg-type]


def rows(rng: np.random.Generator, **over: np.ndarray) -> SampledRows:
    """Random parameters of N rows, in slots 0 .. N - 1."""
    num_prompt = rng.integers(1, 10, N).astype(np.int32)
    seed = rng.integers(0, 2**64, N, dtype=np.uint64)
    made = {
        "slot": np.arange(N, dtype=np.int32),
        "place": num_prompt + rng.integers(0, 25, N).astype(np.int32),
        "num_prompt": num_prompt,
        "temperature": rng.choice([0.0, 0.3, 1.0, 1e-30, 5.0], N).astype(np.float32),
        "top_p": rng.choice([1.0, 0.9, 0.5, 1e-6], N).astype(np.float32),
        "min_p": rng.choice([0.0, 0.05, 1.0], N).astype(np.float32),
        "presence": rng.choice([0.0, 1.5, -0.5], N).astype(np.float32),
        "frequency": rng.choice([0.0, 0.5], N).astype(np.float32),
        "repetition": rng.choice([1.0, 1.7, 0.6], N).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, V, 4 * V], N).astype(np.int32),
        "seed_low": (seed & 0xFFFFFFFF).astype(np.uint32),
        "seed_high": (seed >> np.uint64(32)).astype(np.uint32),
    }
    return SampledRows(**{**made, **over})


def as_torch(given: SampledRows) -> TorchRows:
    """The same for the reference operations."""
    seed = given.seed_low.astype(np.uint64) | given.seed_high.astype(np.uint64) << np.uint64(32)
    numbers = given.temperature, given.top_k, given.top_p, given.min_p, seed.view(np.int64)
    return TorchRows(
        *map(torch.from_numpy, numbers), torch.from_numpy((given.place - given.num_prompt).astype(np.int64))
    )


_ASKED = Asked(*np.ones(4, bool))


def _draw(logits, tokens, rows, asked, masks=None):  # type: ignore[no-untyped-def]
    return sampling.draw(logits, tokens, tokens[rows.slot, rows.place], rows, asked, masks)


_drawn = jax.jit(_draw)


def test_random_numbers() -> None:
    """Every bit of them."""
    rng = np.random.default_rng(0)
    given = rows(rng)
    seed = given.seed_low.astype(np.uint64) | given.seed_high.astype(np.uint64) << np.uint64(32)
    for purpose in (PURPOSE_SAMPLE, PURPOSE_ACCEPT):
        expected = philox.uniform(seed, given.place - given.num_prompt, purpose)
        found = jax.jit(sampling.uniform, static_argnums=1)(SampledRows(*map(jax.numpy.asarray, given)), purpose)
        assert found.dtype == np.float64 and np.array_equal(expected, found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_draw(dtype: str) -> None:
    """Penalties, masks, filters and the draw; ties among the logits too."""

    @given(st.integers(0, 2**32))
    @settings(max_examples=40, deadline=None)
    def run(number: int) -> None:
        rng = np.random.default_rng(number)
        parameters = rows(rng)
        logits = (rng.integers(-8, 8, (N, V)) / 2).astype(dtype)
        table = rng.integers(0, V, (N + 1, LENGTH)).astype(np.int32)
        ends, allowed = (rng.integers(0, 2**32, (N, -(-V // 32)), dtype=np.uint32) for _ in range(2))
        ends &= rng.integers(0, 2**32, ends.shape, dtype=np.uint32)  # a quarter of the tokens
        allowed[0] = 0  # nothing is left: one of those that it forbids is drawn
        new, told, found = _drawn(logits, table, parameters, _ASKED, Masks(ends, allowed))

        expected = torch.from_numpy(logits.copy())
        raw = expected.clone()
        bits = ((ends[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1).reshape(N, -1)[:, :V]
        OPS.mask_tokens(expected, *map(torch.from_numpy, np.nonzero(bits)))
        counts = (torch.from_numpy(one.astype(np.int64)) for one in (parameters.num_prompt, parameters.place))
        numbers = map(torch.from_numpy, (parameters.presence, parameters.frequency, parameters.repetition))
        every = torch.arange(N)
        OPS.penalties(expected, every, torch.from_numpy(table[:N].copy()), *counts, *numbers)
        OPS.apply_bitmask(expected, every, torch.from_numpy(allowed.view(np.int32)))
        tokens = OPS.sample(expected, as_torch(parameters)).numpy()
        assert told[0].tolist() == tokens.tolist()
        assert told[1].tolist() == (table[np.arange(N), parameters.place] == tokens).tolist()
        table[np.arange(N), parameters.place] = tokens
        assert np.array_equal(new, table)
        chosen, rank, _, values = OPS.logprobs(raw, torch.from_numpy(tokens), 20)
        assert rank.tolist() == found.rank.tolist()
        np.testing.assert_allclose(found.chosen, chosen, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.top_values[:, :20], values, rtol=1e-5, atol=1e-5)

    run()


def test_what_nobody_asks_for() -> None:
    """Rows without penalties and filters draw the same whether a branch is taken or not."""
    rng = np.random.default_rng(1)
    ones, zeros = np.ones(N, np.float32), np.zeros(N, np.float32)
    plain = rows(
        rng, top_p=ones, min_p=zeros, presence=zeros, frequency=zeros, repetition=ones, top_k=np.zeros(N, np.int32)
    )
    logits = rng.normal(size=(N, V)).astype(np.float32)
    table = np.zeros((N + 1, LENGTH), np.int32)
    few = Asked(*np.array([True, False, False, False]))
    assert np.array_equal(_drawn(logits, table, plain, _ASKED)[1], _drawn(logits, table, plain, few)[1])


def test_what_is_no_number() -> None:
    """A row with a NaN is told as broken; the others are drawn."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(N, V)).astype(np.float32)
    logits[2, 5] = np.nan
    _, told, _ = _drawn(logits, np.zeros((N + 1, LENGTH), np.int32), rows(rng), _ASKED)
    assert told[0, 2] == BROKEN and (np.delete(told[0], 2) >= 0).all()


@pytest.mark.parametrize("count", [1, 4])
def test_the_table_is_written_in_place(count: int) -> None:
    """However large the table of tokens is: it is not copied."""
    table = jax.numpy.zeros((3, 1 << 22), np.int32)
    whole = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("tp",)), PartitionSpec())
    numbers = np.zeros(sum(drawing_sizes(count).values()), np.int32)
    following, logits = np.zeros(count, np.int32), np.zeros((count, V), np.float32)
    compiled = jit_draw(whole).lower(logits, table, following, numbers, None).compile()
    shape = f"s32[{table.shape[0]},{table.shape[1]}]"
    assert not [line for line in compiled.as_text().splitlines() if shape in line and " copy(" in line]
