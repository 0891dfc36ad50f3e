"""Attention `block_sparse` against dense attention under its mask, in float64: its kernels in Triton's interpreter, or
on a GPU where there is one, and its body in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.attention import AttentionNeed
from engine.types.parallel import Parallel
from engine_cuda.attention_block_sparse.body import BlockSparseBody
from engine_cuda.attention_block_sparse.card import BlockSparseAttention, BlockSparseOptions
from engine_cuda.attention_block_sparse.pattern import Pattern
from engine_cuda.attention_block_sparse.triton_body import TritonBlockSparse
from engine_cuda.interpreter import interpreted
from engine_sdk.conformance.attention.case import LSE_TOLERANCE, TOLERANCE, Case, Form
from engine_sdk.conformance.attention.dense import dense

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [] if interpreted() else pytest.mark.gpu
MIXED = [[150], [3], range(5, 8), range(12), range(40, 110)]
"""Two decodes, a short extend, a prompt and a later chunk of one."""


def driver(dtype: str, *, tp: int = 1, tp_rank: int = 0, **options: Any) -> BlockSparseBody:
    """The driver, as the engine builds it."""
    start = SimpleNamespace(
        parallel=Parallel(tp=tp),
        place=SimpleNamespace(rank=tp_rank, tp_rank=tp_rank),
        sites=[SimpleNamespace(divided=True)],
    )
    context: Any = SimpleNamespace(
        options=BlockSparseOptions(**options), device=torch.device(DEVICE), dtype=getattr(torch, dtype), start=start
    )
    return BlockSparseBody(context)


class Masked(Case):
    """A step of which each head sees the blocks that the definition names, and no other."""

    pattern = Pattern(64, 16, 8, 1, True)

    def sees(self, head: int, num_heads: int, query: int, key: int) -> bool:
        """As the docstring of the options has it, key by key."""
        size, local, stride, sinks, homo_head = self.pattern
        b, c = query // size, key // size
        earlier = 0 if homo_head or not stride else head * max(1, stride // num_heads)
        return key <= query and (c < sinks or b - c < local or (stride > 0 and (c + 1 + earlier) % stride == 0))

    def verify(self, body: BlockSparseBody, first: int = 0, total: int | None = None) -> None:
        """Run the step and compare each head with the oracle."""
        heads = self.need.num_q_heads
        out, lse = (x.double().cpu().numpy() for x in self.run(body) if x is not None)
        group, start = self.form.group_size, 0
        for row, places in enumerate(self.index):
            here, keys = slice(start, start + len(places)), range(int(self.lengths[row]))
            for head in range(heads):
                seen = np.array(
                    [[self.sees(first + head, total or heads, int(i), key) for key in keys] for i in places], bool
                ).reshape(len(places), len(keys))
                one = slice(head // group, head // group + 1)
                expected = dense(
                    self.q[here, head : head + 1].double().cpu().numpy(), self.k[row][:, one], self.v[row][:, one],
                    self.ahead[row], seen, self.layer.scale, self.extras,
                )  # fmt: skip
                near, near_lse = TOLERANCE[self.form.dtype], LSE_TOLERANCE[self.form.dtype]
                np.testing.assert_allclose(out[here, head : head + 1], expected.out, rtol=near, atol=near)
                np.testing.assert_allclose(lse[here, head : head + 1], expected.lse, rtol=near_lse, atol=near_lse)
            start += len(places)
        assert np.isfinite(out[start:]).all()
        self._check_neighbours()


def step(pattern: Pattern, form: Form, rows: Any, num_decodes: int, **how: Any) -> Masked:
    found = Masked(form, rows, num_decodes, form.block_size * form.blocks, device=DEVICE, **how)
    found.pattern = pattern
    return found


PATTERNS = [Pattern(16, 2, 3, 1, True), Pattern(8, 1, 4, 0, False), Pattern(20, 2, 0, 2, True)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_step_of_all_kinds_of_rows(pattern: Pattern, plain: bool) -> None:
    """Heads that share keys, also where they see different blocks; pages of other sizes than blocks; padding."""
    dtype = "float64" if plain else "float32"
    body = driver(dtype, plain=plain, **pattern._asdict())
    assert isinstance(body, TritonBlockSparse) != plain
    form = Form(dtype=dtype, head_size=24, num_kv_heads=2, group_size=3, block_size=7)
    step(pattern, form, MIXED, 2, padding_tokens=2, strided=True).verify(body)


@pytest.mark.parametrize("plain", [False, True])
def test_any_step(plain: bool) -> None:
    # The interpreter takes a second or two for each.
    @settings(max_examples=40 if plain else 4, deadline=None, derandomize=True, database=None)
    @given(
        st.builds(
            Pattern, st.sampled_from([1, 4, 16, 24]), st.integers(1, 4), st.integers(0, 5), st.integers(0, 3),
            st.booleans(),
        ),
        st.builds(
            Form, num_kv_heads=st.sampled_from([1, 2]), group_size=st.sampled_from([1, 2, 3]),
            block_size=st.sampled_from([1, 4, 7, 16]), kv_dtype=st.sampled_from([None, "bfloat16"]),
        ),
        st.lists(st.integers(-1, 90), max_size=3),
        st.lists(st.sets(st.integers(0, 90), min_size=1, max_size=8), max_size=2),
        st.tuples(st.integers(0, 70), st.integers(1, 40)),
        st.integers(0, 3),
    )  # fmt: skip
    def check(
        pattern: Pattern, form: Form, decodes: list[int], gaps: list[set[int]], chunk: tuple[int, int], padding: int
    ) -> None:
        rows = [*([n] for n in decodes), *(sorted(places) for places in gaps), range(chunk[0], sum(chunk))]
        body = driver("float32", plain=plain, **pattern._asdict())
        step(pattern, form, rows, len(decodes), padding_tokens=padding).verify(body)

    check()


@pytest.mark.parametrize("plain", [False, True])
def test_heads_of_a_rank_are_those_of_the_model(plain: bool) -> None:
    """Which blocks a head sees follows from its place among all ranks' heads."""
    pattern, form = Pattern(4, 1, 8, 0, False), Form(num_kv_heads=1, group_size=3)
    body = driver("float32", tp=2, tp_rank=1, plain=plain, **pattern._asdict())
    step(pattern, form, [[77], range(30, 50)], 1).verify(body, first=3, total=6)


def test_blocks_of_a_pattern_are_those_of_its_definition() -> None:
    for pattern in [*PATTERNS, Pattern(1, 2, 5, 3, False), Pattern(1, 1, 1, 0, True)]:
        for own in range(40):
            for shift in range(pattern.stride if pattern.shifts else 1):
                expected = [
                    c
                    for c in range(own + 1)
                    if c < pattern.sinks
                    or own - c < pattern.local
                    or (pattern.stride and (c + 1 + shift) % pattern.stride == 0)
                ]
                assert pattern.seen(own, shift).tolist() == expected


def test_what_is_not_seen_is_not_read() -> None:
    """The pages of blocks that no query sees may hold anything: the table names one that is full of NaN."""
    pattern, form = Pattern(16, 2, 4, 1, True), Form(block_size=16)
    for plain in (False, True):
        found = step(pattern, form, [[150], range(100, 128)], 1)
        for row in range(2):
            own = {place // 16 for place in found.rows[row]}
            for block in range(found.full_table.shape[1]):
                if not any(block in pattern.seen(b, 0) for b in own):
                    found.batch.block_table[row, block] = found.poison
        assert (found.batch.block_table == found.poison).sum() > 8
        found.verify(driver("float32", plain=plain, **pattern._asdict()))


def test_work_follows_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decode over 4,096 keys the reference gathers 6 of 64 blocks."""
    pattern = Pattern(64, 2, 16, 1, True)
    found = step(pattern, Form(num_kv_heads=1, group_size=1), [[4095]], 1)
    (piece,) = driver("float32", plain=True, **pattern._asdict()).plan(found.batch, found.group).pieces
    assert [keys.num_keys for keys in piece.keys] == [6 * 64]


def test_the_card_refuses_by_reason() -> None:
    need = Form().need("cpu")
    assert BlockSparseAttention.unsupported(need) == []
    for changes, reason in (
        ({"kind": "mla"}, "kind 'mla'"),
        ({"kind": "encoder"}, "kind 'encoder'"),
        ({"kind": "sliding", "sliding_window": 9}, "kind 'sliding'"),
        ({"sliding_window": 9}, "sliding window"),
        ({"soft_cap": 3.0}, "soft cap"),
        ({"features": frozenset({"tree"})}, "'tree'"),
        ({"features": frozenset({"sinks"})}, "'sinks'"),
        ({"features": frozenset({"alibi"})}, "'alibi'"),
        ({"dtype": "float64", "kv_dtype": "float64", "device": "cuda"}, "float64"),
    ):
        changed: AttentionNeed = Form().need("cpu")
        changed = type(need)(**{**vars(changed), **changes})
        assert any(reason in said for said in BlockSparseAttention.unsupported(changed)), reason
    assert "leaves out" in BlockSparseAttention.remarks(need)[0]
