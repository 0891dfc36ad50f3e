"""Ragged paged attention beside float64 in numpy: decodes, chunks of prompts, and mixtures of them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types.plan import StepPlan
from engine_tpu import attention, attention_pallas
from engine_tpu.attention import Blocks, Form, Writes, as_stored, attend, held, write_pages, write_tokens
from engine_tpu.buckets import Bucket, Packing, fill_tokens

PAGE, WIDTH, HEADS, KV_HEADS, DIM = 4, 12, 4, 2, 8
PAGES, SLOTS = 64, 4


class Case(NamedTuple):
    """A step, its pool, and what stands in it."""

    plan: StepPlan
    bucket: Bucket
    table: np.ndarray
    pool: np.ndarray
    q: np.ndarray
    kv: np.ndarray
    history: list[np.ndarray]


def case(number: int, decodes: bool, dtype: str = "float64", dim: int = DIM, window: int | None = None) -> Case:
    """Random rows: some begin, some go on; pages in any order, those behind a row's end, or that left its window, not
    numbers at all."""
    rng = np.random.default_rng(number)
    rows = 4
    computed = rng.integers(0, 20, rows).astype(np.int32)
    counts = (np.ones(rows) if decodes else rng.integers(1, 20, rows)).astype(np.int32)
    plan = StepPlan(
        step_id=0,
        slot_of_row=rng.permutation(rows).astype(np.int32),
        num_computed=computed,
        num_tokens=counts,
        samples=np.ones(rows, bool),
        num_decodes=rows if decodes else 0,
        new_slots=[],
        new_blocks=[],
    )
    bucket = Bucket(6, 6, 6, True) if decodes else Bucket(6, 96, 6, False)
    table = np.zeros((6, WIDTH), np.int32)
    free = iter(rng.permutation(np.arange(1, PAGES)))
    pool = np.full((PAGES, 2 * KV_HEADS, PAGE, dim), np.nan)
    pool[0] = 0
    history = []
    for row in range(rows):
        length = computed[row] + counts[row]
        table[row, : -(-length // PAGE)] = [next(free) for _ in range(-(-length // PAGE))]
        mine = rng.normal(size=(length, 2 * KV_HEADS, dim)).astype(dtype)
        history.append(mine)
        seen = 0 if window is None else max(0, computed[row] + 1 - window) // PAGE * PAGE
        for at in range(seen, computed[row]):
            pool[table[row, at // PAGE], :, at % PAGE] = mine[at]
    kv = np.zeros((bucket.tokens, 2 * KV_HEADS, dim), dtype)
    new = np.concatenate([mine[done:] for mine, done in zip(history, computed, strict=True)])
    kv[: len(new)] = new
    q = rng.normal(size=(bucket.tokens, HEADS, dim)).astype(dtype)
    return Case(plan, bucket, table, pool.astype(dtype), q, kv, history)


def parts_of(one: Case) -> dict[str, np.ndarray]:
    """The step's numbers, as they travel."""
    _, views = Packing(one.bucket, 1, PAGE, SLOTS).array()
    fill_tokens(views, one.plan, one.bucket, PAGE)
    return views


def written(one: Case) -> Any:
    """The pool with the step's tokens in it."""
    part, pool = parts_of(one), jnp.asarray(one.pool)
    if one.bucket.decodes:
        page = one.table[np.arange(6), part["position"] // PAGE]
        return write_tokens(pool, jnp.asarray(one.kv), page, part["position"] % PAGE)
    page = one.table[part["piece_row"], part["piece_index"]] * (part["piece_high"] > part["piece_low"])
    return write_pages(
        pool, jnp.asarray(one.kv), Writes(page, part["piece_token"], part["piece_low"], part["piece_high"])
    )


def blocks_of(one: Case) -> Blocks:
    """The step's queries."""
    part, rows = parts_of(one), np.arange(6, dtype=np.int32)
    if one.bucket.decodes:
        return Blocks(rows, rows, (part["slot"] < SLOTS).astype(np.int32), part["position"], rows, 1)
    numbers = (part[f"block_{name}"] for name in ("row", "first", "count", "position"))
    return Blocks(*numbers, part["token_place"], one.bucket.queries)


def expected(one: Case, form: Form) -> np.ndarray:
    """[T, HEADS * DIM], token by token."""
    out, token = np.zeros(one.q.shape), 0
    for row, mine in enumerate(one.history):
        for at in range(int(one.plan.num_computed[row]), len(mine)):
            first = 0 if form.window is None else max(0, at + 1 - form.window)
            seen = mine[first : at + 1].astype(np.float64)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = seen[:, kv_head] @ one.q[token, head].astype(np.float64) * form.scale
                if form.soft_cap is not None:
                    scores = np.tanh(scores / form.soft_cap) * form.soft_cap
                weights = np.exp(scores - scores.max())
                out[token, head] = weights / weights.sum() @ seen[:, KV_HEADS + kv_head]
            token += 1
    return out.reshape(one.bucket.tokens, -1)


FORMS = {
    "full": Form(1 / math.sqrt(DIM)),
    "window": Form(0.3, window=5),
    "window of one": Form(0.3, window=1),
    "soft cap": Form(0.7, soft_cap=1.5),
    "both": Form(0.5, window=7, soft_cap=2.0),
}


@pytest.mark.parametrize("turns", [False, True], ids=["at once", "in turns"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("decodes", [True, False], ids=["decodes", "mixed"])
def test_attention(form: Form, decodes: bool, turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token that counts, whatever the pages of others hold; all keys at once, or by pieces of two pages."""
    if turns:
        monkeypatch.setattr(attention, "_MOST_KEYS", 2 * PAGE)
        monkeypatch.setattr(attention, "_LEAST_KEYS", PAGE)
    compiled = jax.jit(
        lambda q, pool, table, arrays: attend(q, pool, table, Blocks(*arrays, 1 if decodes else 16), form)
    )

    @given(st.integers(0, 2**32))
    @settings(max_examples=6, deadline=None)
    def run(number: int) -> None:
        one = case(number, decodes, window=form.window)
        found = np.asarray(compiled(one.q, written(one), one.table, tuple(blocks_of(one))[:-1]))
        total = int(one.plan.num_tokens.sum())
        np.testing.assert_allclose(found[:total], expected(one, form)[:total], rtol=1e-12, atol=1e-12)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("form", [FORMS["full"], FORMS["both"]], ids=["full", "both"])
@pytest.mark.parametrize("decodes", [True, False], ids=["decodes", "mixed"])
def test_kernel(form: Form, decodes: bool) -> None:
    """The Pallas kernel, in float32 and interpreted, beside float64."""
    for number in range(2):
        one = case(number, decodes, "float32", 128, form.window)
        scaled = form._replace(scale=form.scale / 4)
        pool, table = written(one), jnp.asarray(one.table)
        found = attention_pallas.attend(jnp.asarray(one.q), pool, table, blocks_of(one), scaled, interpret=True)
        total = int(one.plan.num_tokens.sum())
        np.testing.assert_allclose(found[:total], expected(one, scaled)[:total], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_kernel_is_lowered(queries: int, dtype: str) -> None:
    """For a TPU, as far as JAX does it without one: to Mosaic's operations."""
    blocks, shape, numbers = 8, jax.ShapeDtypeStruct, jnp.int32
    arrays = (*(shape((blocks,), numbers) for _ in range(4)), shape((blocks * queries,), numbers))
    q = shape((blocks * queries, 16, 128), "float32" if dtype == "float32" else "bfloat16")
    form = Form(0.1, window=64, soft_cap=30.0)
    function = jax.jit(
        lambda q, pool, table, arrays: attention_pallas.attend(q, pool, table, Blocks(*arrays, queries), form)
    )
    traced = function.trace(q, shape((100, 16, 32, 128), dtype), shape((blocks, 32), numbers), arrays)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_kernel_is_compiled(queries: int, dtype: str) -> None:
    """By the TPU's own compiler, which needs no TPU, with the precision that the worker sets."""
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    from compiled_steps import devices_of

    place = jax.sharding.SingleDeviceSharding(devices_of("v5e:2x2")[0])
    blocks = 8

    def told(shape: tuple[int, ...], of: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, of, sharding=place)

    arrays = (*(told((blocks,), "int32") for _ in range(4)), told((blocks * queries,), "int32"))
    q = told((blocks * queries, 16, 128), "float32" if dtype == "float32" else "bfloat16")
    form = Form(0.1, window=64, soft_cap=30.0)
    function = jax.jit(
        lambda q, pool, table, arrays: attention_pallas.attend(q, pool, table, Blocks(*arrays, queries), form)
    )
    with jax.default_matmul_precision("highest"):
        lowered = function.lower(q, told((100, 16, 32, 128), dtype), told((blocks, 32), "int32"), arrays)
    assert lowered.compile().memory_analysis().argument_size_in_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "form"),
    [
        ("QWEN3", 1, {}),
        ("LLAMA", 4, {"head_dim": 64, "num_key_value_heads": 4}),
        ("QWEN3", 4, {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 256}),
    ],
    ids=["dense", "heads of 64 on a mesh", "experts on a mesh"],
)
def test_steps_are_compiled(model: str, devices: int, form: dict[str, Any]) -> None:
    """A decode step, one with a prompt, and their draws, by the TPU's own compiler, on one chip and on a mesh: it
    refuses no form, and the cache is written in place."""
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    import compiled_steps

    few = {"num_hidden_layers": 2, "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    made = compiled_steps.devices_of("v5e:2x2")[:devices]
    config = {**getattr(compiled_steps, model), **few, **form}
    kernel = config["head_dim"] % attention_pallas.LANES == 0
    steps = compiled_steps.steps_of(config, made, 8, 1024, compiled_steps.BFLOAT16, kernel)
    pages = 2000
    for bucket in (Bucket(8, 8, 8, True), Bucket(8, 64, 8, False)):
        told = compiled_steps.compiled(steps, bucket, pages)
        cache = pages * steps.page_bytes / devices
        assert told.in_place >= cache and told.besides < cache / 4
        assert told.operations > 0 and told.kept > told.in_place
    assert compiled_steps.compiled_draws(steps, 8, few["vocab_size"]) > 0


@pytest.mark.parametrize("decodes", [True, False], ids=["decodes", "mixed"])
def test_what_is_written(decodes: bool) -> None:
    """Each token at its place, and nothing else but in the page that nobody owns."""
    one = case(7, decodes)
    found, wanted = np.array(written(one)), one.pool.copy()
    for row, mine in enumerate(one.history):
        for at in range(int(one.plan.num_computed[row]), len(mine)):
            wanted[one.table[row, at // PAGE], :, at % PAGE] = mine[at]
    np.testing.assert_array_equal(found[1:], wanted[1:])


def test_a_cache_of_8_bits() -> None:
    """What is too large for its floats becomes the largest of them."""
    x = jnp.asarray([1.0, 1e6, -1e6], jnp.float32)
    assert as_stored(x, jnp.float8_e4m3fn).astype(jnp.float32).tolist() == [1.0, 448.0, -448.0]


@pytest.mark.parametrize(("dtype", "decodes"), [("bfloat16", True), ("float8_e4m3fn", False)])
def test_a_cache_of_bits(dtype: str, decodes: bool) -> None:
    """A pool that holds the bits of its numbers is written and read as one that holds the numbers."""
    one = case(11, decodes, "float32")
    assert held(jnp.dtype(dtype), "tpu") == dtype and held(jnp.dtype("float32"), "cpu") == "float32"
    bits = held(jnp.dtype(dtype), "cpu")
    assert jnp.issubdtype(bits, jnp.unsignedinteger)
    kv = as_stored(jnp.asarray(one.kv), jnp.dtype(dtype))
    q, numbers = jnp.asarray(one.q).astype(jnp.bfloat16), jnp.asarray(one.pool).astype(dtype)

    @jax.jit
    def run(pool: Any, kv: Any) -> Any:
        pool = written(one._replace(pool=pool, kv=kv))
        return pool, attend(q, pool, jnp.asarray(one.table), blocks_of(one), FORMS["full"]).view(np.uint16)

    (floats, out), (integers, same) = run(numbers, kv), run(numbers.view(bits), kv.view(bits))
    assert integers.dtype == bits and np.array_equal(np.asarray(floats.view(bits)), np.asarray(integers))
    assert np.array_equal(np.asarray(out), np.asarray(same))
