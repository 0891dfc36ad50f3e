"""The counts against sums over every layer, position and key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types.model import KVSpec, ModelDescription
from engine.types.start import WorkerReady
from engine_bench.counting import Counter, Work, seen

FULL = KVSpec(kind="full", num_kv_heads=2, head_size=8)
SLIDING = KVSpec(kind="sliding", num_kv_heads=2, head_size=8, sliding_window=5)
VOCABULARY, HIDDEN, BODY = 100, 16, 5000


def counter(tied: bool, own_head: bool = False, cache: str | None = None) -> Counter:
    model = ModelDescription(
        architecture="x", dtype="float32", vocab_size=VOCABULARY, hidden_size=HIDDEN, num_layers=2, num_q_heads=4,
        max_model_len=64, kv_specs=(FULL, SLIDING), config={"tie_word_embeddings": tied},
    )  # fmt: skip
    parameters = BODY + VOCABULARY * HIDDEN * (1 if tied else 2)
    head = VOCABULARY * HIDDEN if own_head else 0  # quantised, of one byte each
    ready = WorkerReady(
        num_pages=2, weight_bytes=4 * parameters + head, cache_bytes=0, num_parameters=parameters, load_seconds=0.0
    )
    return Counter(model, ready, "float32", own_head, cache)


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 20))
def test_keys_seen_one_by_one(start, size, window):
    each = [position + 1 if window is None else min(position + 1, window) for position in range(start, start + size)]
    assert seen(start, size, window) == sum(each)


@pytest.mark.parametrize("tied", [False, True])
def test_an_input_embedding_of_its_own_is_not_read(tied):
    assert counter(tied).step_bytes == 4 * (BODY + VOCABULARY * HIDDEN)
    assert counter(tied).steps(3) == Work(read_bytes=12 * (BODY + VOCABULARY * HIDDEN))


def test_a_quantised_head_is_read_and_the_embedding_it_was_tied_to_is_not():
    assert counter(tied=True, own_head=True).step_bytes == 4 * BODY + VOCABULARY * HIDDEN


def test_a_cache_in_8_bits_is_read_as_such():
    assert counter(True, cache="float8_e4m3fn").decodes(9, 4).read_bytes == counter(True).decodes(9, 4).read_bytes / 4


@given(st.integers(0, 30), st.integers(1, 30))
def test_decodes_are_chunks_of_one(start, count):
    several = Work()
    for position in range(start, start + count):
        several += counter(True).chunk(position, 1, sampled=1)
    assert counter(True).decodes(start, count) == several


@given(st.integers(0, 30), st.integers(1, 30))
def test_a_chunk_reads_what_it_sees_once_and_computes_each_pair(start, size):
    work = counter(True).chunk(start, size, sampled=1)
    flops, keys = 2.0 * (size * BODY + VOCABULARY * HIDDEN), 0
    for window in (None, 5):
        pairs = [(q, k) for q in range(start, start + size) for k in range(q + 1) if window is None or q - k < window]
        flops += 4.0 * 4 * 8 * len(pairs)  # a product for the score and one for the value, each two operations
        keys += len({k for _, k in pairs})
    assert work == Work(keys * 2 * 2 * 8 * 4, flops)
