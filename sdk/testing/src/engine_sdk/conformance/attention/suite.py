"""The suite of point `attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.interfaces.attention import AttentionBackend, AttentionCard, AttentionNeed
from engine.interfaces.latent_attention import LatentAttentionBackend
from engine.interfaces.platform import STREAM, CaptureKey
from engine.plugin import Registry
from engine_sdk.conformance.attention.case import (
    TOLERANCE,
    Case,
    Form,
    Keys,
    Rows,
    batches,
    check_plans_by_launches,
    check_shares,
    check_unseen,
    copy_into,
    whole_rows,
)
from engine_sdk.conformance.attention.dense import Tree
from engine_sdk.conformance.attention.latent import LAUNCHED, LatentTests, LatentThorough
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.contexts import platform_card_of, require_capture, worker_context
from engine_sdk.conformance.timing import median_seconds

DTYPES = ("float64", "float32", "bfloat16", "float16")
CODES = ("float8_e4m3fn", "int8")
"""What a cache of 8 bits holds."""
DECODES: Rows = [[0], [15], [16], [37], [5]]
MIXED: Rows = [[20], [33], range(23), range(17, 40), range(31, 33)]
"""Two decodes, a whole prompt, a later chunk of one, and a short extend."""
ANY_ROWS: list[tuple[Rows, int]] = [
    ([[7 * i % 61] for i in range(24)], 24),
    ([[20], [33], range(2), range(17, 40), range(29)], 2),
    ([range(3, 55)], 0),
    ([[90]], 1),
    ([[11], range(30, 32), range(8), range(44, 53), range(36)], 1),
]
"""Steps of up to 24 rows and 56 tokens; the first has the most keys."""
TREE_ROWS: Rows = [[80], range(30, 37), range(40), range(67, 74), range(120, 130)]
TREES = {1: Tree([0, 0, 1, 1, 2, 4]), 3: Tree([0, 1, 1, 0, 4, 3]), 4: Tree([0, 1, 0])}
"""By row: beside a decode and a prompt, three that end with trees; the last one's has earlier tokens of a prompt."""


class AttentionConformance(LatentTests, Conformance):
    """Attention against a dense float64 oracle, over a pool in which all that must not be read is NaN.

    Drivers of kind "mla", and they alone, are put through the tests of latent attention.
    """

    point = "attention"
    protocol = "AttentionBackend"

    # -- the driver --------------------------------------------------------------------------------------------------
    @classmethod
    def needs(cls) -> Sequence[AttentionNeed]:
        base = Form().need(cls.device)
        return [
            base,
            replace(base, dtype="float64", kv_dtype="float64"),
            replace(base, kind="sliding", sliding_window=5, soft_cap=20.0),
            replace(base, kind="encoder", head_size=7),
            replace(base, kind="encoder", sliding_window=5, features=frozenset({"two_sided"})),
            replace(base, features=frozenset({"kv_index"})),
            replace(base, kind="cross", features=frozenset({"kv_index"})),
            replace(base, features=frozenset({"lse"})),
            replace(base, features=frozenset({"kv_index", "tree"})),
            replace(base, kind="mla", num_q_heads=4, num_kv_heads=1, head_size=24, rope_size=8),
        ]

    @classmethod
    def impossible(cls) -> Sequence[AttentionNeed]:
        base = Form().need(cls.device)
        return [
            replace(base, framework="abacus"),
            replace(base, kind="telepathic"),
            replace(base, dtype="float3"),
            replace(base, features=frozenset({"clairvoyance"})),
        ]

    @classmethod
    def interface(cls) -> type:
        """Of a driver that serves layers of kind "mla", `LatentAttentionBackend`; else `AttentionBackend`."""
        card = cast("type[AttentionCard]", cls.subject().card)
        return LatentAttentionBackend if "mla" in card.kinds else AttentionBackend

    @classmethod
    def methods(cls) -> Sequence[str]:
        """Keys and values are moved where drafts branch; who rotates says so by the method."""
        rotates = hasattr(cls.body(), "write_rotated")
        names = [name for name in super().methods() if rotates or name != "write_rotated"]
        trees = cls.subject().reasons(replace(Form().need(cls.device), features=frozenset({"tree"})))
        return [name for name in names if name != "move"] if trees else names

    @classmethod
    def backend(cls, dtype: str) -> Any:
        """A body for this dtype; made once."""
        return cls.built(lambda: worker_context(cls.subject(), cls.device, dtype), dtype)

    @classmethod
    def case(cls, form: Form, rows: Rows, num_decodes: int, **how: Any) -> Case:
        """A step of these rows; skipped with the card's reasons where it serves no such layer."""
        need = form.need(cls.device, rows if "share" not in how else [[-1]])
        if "trees" in how:
            need = replace(need, features=need.features | {"tree"})
        cls.require(need)
        card = cast("type[AttentionCard]", cls.subject().card)
        per_page = card.tokens_per_page(need)
        assert isinstance(per_page, int) and per_page > 0, "tokens_per_page is not a number of tokens"
        lse, scales = cls.gives_lse(need), card.scale_bytes(need)
        assert isinstance(scales, int) and scales >= 0, "scale_bytes is not a number of bytes"
        return Case(
            form, rows, num_decodes, per_page * form.blocks, device=cls.device, lse=lse, scale_bytes=scales, **how
        )

    @classmethod
    def gives_lse(cls, need: AttentionNeed) -> bool:
        """Whether the card serves this with the feature "lse": then every test compares it."""
        return not cls.subject().reasons(replace(need, features=need.features | {"lse"}))

    @classmethod
    def require_lse(cls, need: AttentionNeed) -> None:
        """Skip the test where the card does not."""
        cls.require(replace(need, features=need.features | {"lse"}))

    @classmethod
    def served(cls, forms: Sequence[Form]) -> list[Form]:
        """Those of these layers that are served; skipped with the card's reasons where there is none."""
        found = [form for form in forms if not cls.subject().reasons(form.need(cls.device))]
        if not found:
            cls.require(forms[-1].need(cls.device))
        return found

    @classmethod
    def verify(cls, form: Form, rows: Rows, num_decodes: int, **how: Any) -> None:
        """Run one step and compare it with the oracle."""
        case = cls.case(form, rows, num_decodes, **how)
        case.check(*case.run(cls.backend(form.dtype)))

    @classmethod
    def verify_together(cls, cases: Sequence[Case]) -> None:
        """Run one step of a model whose layers have these forms: all caches, then all plans, then one layer each."""
        body = cls.backend(cases[0].form.dtype)
        for index, case in enumerate(cases):
            case.group = msgspec.structs.replace(case.group, index=index)
            case.layer = replace(case.layer, group=case.group)
        caches = [case.write_history(body) for case in cases]
        plans = [body.plan(case.batch, case.group) for case in cases]
        for case, cache, plan in zip(cases, caches, plans, strict=True):
            out, lse = case.outputs()
            case.launch(body, cache, plan, out, lse)
            case.check(out, lse)

    # -- one property each -------------------------------------------------------------------------------------------
    def test_page_format(self) -> None:
        """The card names how keys and values lie in a page, or leaves it to the driver's name and version."""
        card = cast("type[AttentionCard]", self.subject().card)
        for need in self.needs():
            if not self.subject().reasons(need):
                named = card.page_format(need)
                assert isinstance(named, str) and named == card.page_format(need), f"page_format answers {named!r}"

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_decode(self, dtype: str) -> None:
        """One token a row, rows of different lengths, in blocks that are full, begun and new."""
        self.verify(Form(dtype=dtype), DECODES, 5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_prefill(self, dtype: str) -> None:
        """Whole prompts: each query sees its own key and those before it, and no other."""
        self.verify(Form(dtype=dtype), [range(1), range(16), range(45)], 0)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_mixed_rows(self, dtype: str) -> None:
        """Decodes, prompts, chunks of prompts and short extends in one step."""
        self.verify(Form(dtype=dtype), MIXED, 2)

    def test_forms_of_one_kind(self) -> None:
        """Layers of one kind may differ in heads and head size: what holds for one form holds for no other."""
        forms = [Form(dtype=dtype) for dtype in ("float32", "bfloat16", "float16")]
        dtype = self.served(forms)[0].dtype
        forms = [Form(dtype=dtype, head_size=64), Form(dtype=dtype, num_kv_heads=1, group_size=8, head_size=64)]
        forms.append(Form(dtype=dtype, num_kv_heads=4, group_size=1, head_size=128))
        self.verify_together([self.case(form, MIXED, 2, seed=seed) for seed, form in enumerate(forms)])

    @pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
    def test_head_sizes(self, head_size: int) -> None:
        """Those of models, in each dtype that is served: of each the first."""
        for dtype in ("bfloat16", "float32", "float16", "float64"):
            form = Form(head_size=head_size, dtype=dtype)
            if not self.subject().reasons(form.need(self.device)):
                return self.verify(form, MIXED, 2)
        self.require(Form(head_size=head_size).need(self.device))

    @pytest.mark.parametrize(("num_kv_heads", "group_size"), [(1, 1), (4, 1), (1, 4), (2, 7), (3, 2)])
    def test_grouped_heads(self, num_kv_heads: int, group_size: int) -> None:
        """Query head h reads KV head h // group_size."""
        self.verify(Form(num_kv_heads=num_kv_heads, group_size=group_size), MIXED, 2)

    @pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64, 128])
    def test_block_sizes(self, block_size: int) -> None:
        """Tables are followed, whatever a block holds."""
        self.verify(Form(block_size=block_size), MIXED, 2)

    @pytest.mark.parametrize("blocks", [2, 3])
    def test_blocks_of_smaller_groups(self, blocks: int) -> None:
        """A group that needs less than the largest has more tokens to a page: a whole multiple."""
        self.verify(Form(block_size=16, blocks=blocks), MIXED, 2)

    @pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 1000])
    def test_sliding_window(self, window: int) -> None:
        """A query sees `window` keys, its own included. Blocks that left it are stale: their pages hold NaN."""
        self.verify(Form(kind="sliding", window=window), [[40], [3], range(37), range(30, 52)], 2)

    @pytest.mark.parametrize("soft_cap", [0.5, 30.0])
    def test_soft_cap(self, soft_cap: float) -> None:
        """Scores become soft_cap * tanh(scores / soft_cap)."""
        self.verify(Form(soft_cap=soft_cap, head_size=32), MIXED, 2)

    def test_soft_cap_in_a_window(self) -> None:
        """Both at once."""
        self.verify(Form(kind="sliding", window=9, soft_cap=2.0), MIXED, 2)

    @pytest.mark.parametrize("window", [None, 6])
    def test_sinks(self, window: int | None) -> None:
        """One more score for each head, neither scaled nor capped, whose weight goes to nobody; lse counts it."""
        kind = "full" if window is None else "sliding"
        for soft_cap in (None, 2.0):
            self.verify(Form(kind=kind, window=window, soft_cap=soft_cap, sinks=True), MIXED, 2)
        self.verify(Form(kind=kind, window=window, sinks=True), [[500], [3], [40]], 3)

    @pytest.mark.parametrize("window", [None, 6])
    def test_alibi(self, window: int | None) -> None:
        """Scores fall with the distance of the key, by a slope of each head's own, after the soft cap."""
        kind = "full" if window is None else "sliding"
        for soft_cap in (None, 0.5):
            self.verify(Form(kind=kind, window=window, soft_cap=soft_cap, alibi=True), MIXED, 2)
        self.verify(Form(kind=kind, window=window, alibi=True, sinks=True), [[500], [3], [40]], 3)

    @pytest.mark.parametrize("window", [None, 6])
    def test_relative_bias(self, window: int | None) -> None:
        """To a score is added what each head has for the place of the key from the query, after the soft cap; far away
        it is the same for all."""
        kind = "full" if window is None else "sliding"
        for soft_cap in (None, 0.5):
            self.verify(Form(kind=kind, window=window, soft_cap=soft_cap, relative_bias=True), MIXED, 2)
        self.verify(Form(kind=kind, window=window, relative_bias=True, num_kv_heads=3), [[500], [3], range(150)], 2)

    @pytest.mark.parametrize("window", [None, 6])
    def test_kv_index(self, window: int | None) -> None:
        """At some of a row's places: a query sees the keys up to its own place, in the window where there is one."""
        kind = "full" if window is None else "sliding"
        self.verify(Form(kind=kind, window=window), [[7], [0, 3, 4, 19], [12, 13, 40], range(5, 9)], 1)

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_what_sees_nothing(self, dtype: str) -> None:
        """At kv_index -1: out is 0 and lse -inf, or the sink's score; alone, and beside queries that see keys."""
        rows: Rows = [[-1], [20], [-1], [-1, -1, 0, 1], [-1, -1], range(9, 30)]
        self.verify(Form(dtype=dtype), rows, 3)
        self.verify(Form(dtype=dtype), [[-1], [-1]], 2)
        self.verify(Form(dtype=dtype), [[-1], [-1, -1]], 1)
        form = Form(dtype=dtype, kind="sliding", window=5, sinks=True)
        if not self.subject().reasons(form.need(self.device, rows)):
            self.verify(form, rows, 3)

    @pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
    @pytest.mark.parametrize("window", [None, 6])
    def test_keys_on_several_ranks(self, window: int | None, dtype: str) -> None:
        """Ranks that have each n-th key of a row, and all its queries: put together by lse, their results are those of
        all keys. A query's own key may be another rank's."""
        form = Form(kind="full" if window is None else "sliding", window=window, dtype=dtype)
        rows: Rows = [[7], [0], [40], range(5), range(9, 30)]
        check_shares(lambda form, **how: self.case(form, rows, 3, **how), self.backend, form)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_cross(self, dtype: str) -> None:
        """Every query of a row sees all of its keys, of which none is its own: decodes, and rows of more queries than
        keys and of fewer. With heads that share keys, in blocks of any size."""
        rows: Rows = [[37], [0], [16], [40] * 7, [2] * 30, [299] * 3]
        self.verify(Form(kind="cross", dtype=dtype), rows, 3)
        self.verify(Form(kind="cross", dtype=dtype, group_size=1, num_kv_heads=4, block_size=4), rows[2:], 1)
        self.verify(Form(kind="cross", dtype=dtype), rows[:3], 3)

    def test_strided_tensors(self) -> None:
        """Queries, keys and values are views of one projection, as models cut them."""
        self.verify(Form(), MIXED, 2, strided=True)
        self.verify(Form(), DECODES, 5, strided=True)

    def test_padding_rows(self) -> None:
        """Rows that fill a bucket: one token each, whose key goes to the null page. Their output is finite."""
        self.verify(Form(), DECODES, 5, padding_rows=3)

    def test_padding_tokens(self) -> None:
        """Tokens after the last row: their output is finite."""
        self.verify(Form(), MIXED, 2, padding_tokens=5)

    @pytest.mark.parametrize("window", [None, 9])
    def test_padded_drafts(self, window: int | None) -> None:
        """Rows of fewer drafts are filled up in captured steps: tokens on the null page, at places that nobody wrote
        (NaN here), whose own output nobody reads. They leave that of the row's other tokens alone."""
        form = Form(kind="full" if window is None else "sliding", window=window)
        rows: Rows = [range(30, 33), range(15, 18), range(3)]
        whole, padded = (self.case(form, rows, 0) for _ in range(2))
        body = self.backend(form.dtype)
        if body.capture_level in ("none", "decode"):
            not_served(f"no rows are padded for it: its capture_level is {body.capture_level}")
        if not STREAM.issubset(cast("type[AttentionCard]", self.subject().card).captured_by):
            not_served("no rows are padded for it: its steps are not captured on a stream")
        expected, lse = whole.run(body)
        whole.check(expected, lse)
        padded.batch.slot_mapping[[4, 5, 8]] = 0
        padded.batch.kv_index[[4, 5, 8]] = -1
        out, total = padded.run(body)
        own, near = [0, 1, 2, 3, 6, 7], TOLERANCE[whole.form.dtype]
        torch.testing.assert_close(out[own], expected[own], rtol=near, atol=near)
        if lse is not None and total is not None:
            torch.testing.assert_close(total[own], lse[own], rtol=near, atol=near)

    # -- trees of drafts ---------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("window", [None, 4, 90])
    def test_trees(self, window: int | None) -> None:
        """Nodes see the keys before the tree, those that they follow, and no other: neither their siblings nor what
        follows these. A window counts the tokens that a node follows."""
        form = Form(kind="full" if window is None else "sliding", window=window)
        self.verify(form, TREE_ROWS, 1, trees=TREES, padding_tokens=2)

    def test_nodes_that_are_rows_of_one_token(self) -> None:
        """As passes of draft models have them: each node alone, behind a decode, and all the rows of a step."""
        trees = {1 + size: Tree(TREES[1].parents[:size]) for size in range(7)}
        for window in (None, 90):
            form = Form(kind="full" if window is None else "sliding", window=window)
            self.verify(form, [[80], *([30 + size] for size in range(7))], 1, trees=trees)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_trees_in_every_dtype(self, dtype: str) -> None:
        """In each that is served, with more heads and pages that trees lie across."""
        self.verify(Form(dtype=dtype, num_kv_heads=2, group_size=4, head_size=64), TREE_ROWS, 1, trees=TREES)
        self.verify(Form(dtype=dtype, block_size=4), TREE_ROWS, 1, trees=TREES)

    def test_largest_trees(self) -> None:
        """64 drafts: all follow the row's last token, or each the one before it, or whatever. Over long rows, too."""
        random = torch.Generator().manual_seed(5)
        mixed = [int(torch.randint(i, (), generator=random)) for i in range(1, 65)]
        trees = {0: Tree([0] * 64), 1: Tree(range(64)), 2: Tree(mixed), 3: Tree(mixed)}
        rows: Rows = [range(65), range(3, 68), range(20, 85), range(900, 965)]
        for form in (Form(), Form(num_kv_heads=1, group_size=8, kind="sliding", window=64)):
            self.verify(form, rows, 0, trees=trees)

    def test_trees_with_everything(self) -> None:
        """Soft cap, sinks, and slopes by the number of tokens that a node follows."""
        self.verify(Form(soft_cap=2.0, sinks=True), TREE_ROWS, 1, trees=TREES)
        form = Form(alibi=True, kind="sliding", window=64)
        if not self.subject().reasons(replace(form.need(self.device), features=frozenset({"alibi", "tree"}))):
            self.verify(form, TREE_ROWS, 1, trees=TREES)

    def test_what_nodes_do_not_see(self) -> None:
        """NaN and infinities at a node change not a bit of those that do not follow it."""
        for form in (Form(), Form(block_size=4), Form(kind="sliding", window=64)):
            self.unseen(form, TREE_ROWS, 1, [(1, 33), (1, 36), (3, 71)], trees=TREES)

    def test_ragged_trees(self) -> None:
        """Any rows, some of which end with any tree."""
        self.require(replace(Form().need(self.device), features=frozenset({"tree", "kv_index"})))

        @self.hypothesis_settings(12)
        @given(batches(), st.lists(st.floats(0, 0.99), max_size=64), st.sampled_from([None, 64]))
        def check(batch: dict[str, Any], drawn: list[float], window: int | None) -> None:
            parents = [int(part * (i + 1)) for i, part in enumerate(drawn)]
            first = batch["num_decodes"]
            rows = [*batch["rows"][:first], range(batch["seed"] % 50, batch["seed"] % 50 + len(drawn) + 1)]
            rows += batch["rows"][first:]
            batch |= {"rows": rows, "keys": [(row, place) for row, place in batch["keys"] if row < first]}
            form = Form(dtype="float32", kind="full" if window is None else "sliding", window=window)
            self.unseen(form, **batch, trees={first: Tree(parents)})

        check()

    def test_refilled_plan_of_trees(self) -> None:
        """`plan(out=)` with other trees in rows of as many tokens."""
        rows: list[Rows] = [[range(30, 37), range(7)], [range(16, 23), range(90, 97)]]
        self._refill(Form(), rows, 0, [{0: TREES[1], 1: Tree([0] * 6)}, {1: TREES[1]}])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_moving(self, dtype: str) -> None:
        """Keys and values of slots are moved to others, bit for bit, all read before any is written. Nothing else is
        changed."""
        forms = [Form(dtype=dtype, block_size=size, head_size=64) for size in (16, 24, 8)]
        forms += [replace(forms[0], kv_dtype=kv_dtype) for kv_dtype in ("bfloat16", *CODES)]
        for form in self.served(forms):
            self.case(form, TREE_ROWS, 1, trees=TREES).check_move(self.backend(form.dtype))

    def test_lengths_that_are_bounded_only(self) -> None:
        """`seq_lens_bound` may say more than `seq_lens`, which is exact: the host does not know yet what was kept."""
        self.verify(Form(), DECODES, 5, bound=4)
        self.verify(Form(), MIXED, 2, bound=19)

    def test_narrower_cache(self) -> None:
        """Keys and values are rounded to the cache's dtype when they are written."""
        self.verify(Form(dtype="float32", kv_dtype="bfloat16"), MIXED, 2)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_reading_back(self, dtype: str) -> None:
        """Keys and values can be read, as they were stored, from any slots: blocks of other sizes, narrower caches."""
        forms = [Form(dtype=dtype, block_size=size, head_size=64) for size in (16, 24, 8)]
        forms += [replace(forms[0], kv_dtype=kv_dtype) for kv_dtype in ("bfloat16", *CODES)]
        for form in self.served(forms):
            self.case(form, MIXED, 2).check_read(self.backend(form.dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_writing_rotated(self, dtype: str) -> None:
        """Queries and keys that are rotated where keys are written: whole heads and a part of them, normed or as they
        are, views of one projection, with padding; narrower caches."""
        form = Form(dtype=dtype, head_size=64)
        self.require(form.need(self.device))
        body = self.backend(dtype)
        if not hasattr(body, "write_rotated"):
            not_served("it has no write_rotated: operations rotate before it writes")
        for rotary, normed in ((64, True), (64, False), (24, True), (24, False)):
            rows: Rows = [[20], range(14, 18), range(5)]
            self.case(form, rows, 1, strided=True, padding_tokens=3).check_rotated(body, rotary, normed)
        for narrow in self.served([form, *(replace(form, kv_dtype=kv) for kv in ("bfloat16", *CODES))]):
            self.case(narrow, [[15], [4]], 2).check_rotated(body, 64, True)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_fp8_cache(self, dtype: str) -> None:
        """Keys and values of 8 bits (e4m3), computed with in the queries' precision. Scales are 1, or a token's key of
        a head has one, and its value another."""
        self.verify(Form(dtype=dtype, kv_dtype="float8_e4m3fn"), MIXED, 2)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_int8_cache(self, dtype: str) -> None:
        """The same of whole numbers, which have scales."""
        self.verify(Form(dtype=dtype, kv_dtype="int8"), MIXED, 2)

    @pytest.mark.parametrize("kv_dtype", CODES)
    def test_caches_with_scales(self, kv_dtype: str) -> None:
        """Whatever else a layer has: windows, soft caps, sinks, slopes, trees, keys of an encoder, queries anywhere,
        keys on several ranks, long rows, padding."""
        base = Form(kv_dtype=kv_dtype)
        self.require(base.need(self.device))
        if not self.case(base, DECODES, 5).scale_bytes:
            not_served("its scales are 1")
        gaps: Rows = [[7], [0, 3, 4, 19], [12, 13, 40], range(5, 9)]
        long: Rows = [[700], [3], range(660, 700)]
        for changes, rows, num_decodes, how in (
            ({"kind": "sliding", "window": 9, "soft_cap": 2.0, "sinks": True}, MIXED, 2, {}),
            ({"alibi": True, "head_size": 48, "block_size": 24}, MIXED, 2, {"strided": True}),
            ({"group_size": 7, "head_size": 64, "block_size": 4}, MIXED, 2, {"padding_tokens": 3}),
            ({"group_size": 1, "num_kv_heads": 1, "blocks": 2}, DECODES, 5, {"padding_rows": 2}),
            ({}, gaps, 1, {}),
            ({"num_kv_heads": 1}, long, 2, {"bound": 4}),
            ({"kind": "cross"}, [[37], [0], [40] * 7], 2, {}),
            ({}, TREE_ROWS, 1, {"trees": TREES}),
        ):  # fmt: skip
            form = replace(base, **changes)
            need = form.need(self.device, rows)
            if not self.subject().reasons(
                replace(need, features=need.features | ({"tree"} if how.get("trees") else set()))
            ):
                self.verify(form, rows, num_decodes, **how)
        if self.gives_lse(base.need(self.device, [[-1]])):
            check_shares(lambda form, **how: self.case(form, gaps, 1, **how), self.backend, base)

    @pytest.mark.parametrize("length", [700, 3000])
    def test_long_rows(self, length: int) -> None:
        """Beyond what one piece of work holds: partial results of pieces are put together."""
        form = Form(num_kv_heads=1, group_size=2)
        self.verify(form, [[length], [3], [length // 2 + 1]], 3)
        self.verify(form, [[length - 5], range(length - 40, length)], 1)

    def test_many_rows(self) -> None:
        """More rows than cores, of all lengths."""
        self.verify(Form(), [[7 * i % 61] for i in range(70)], 70)

    def test_large_scores(self) -> None:
        """Scores in the hundreds neither overflow nor become 0 / 0."""
        case = self.case(Form(), MIXED, 2)
        case.q *= 300
        case.check(*case.run(self.backend("float32")))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_lse_puts_parts_together(self, dtype: str) -> None:
        """Of a row's keys one part here and the rest there: means of the two results by their lse are the whole."""
        form = Form(dtype=dtype)
        self.require_lse(form.need(self.device))
        whole, *parts = (self.case(form, [[last]], 1) for last in (59, 20, 38))
        body, first = self.backend(dtype), 0
        for part in parts:
            keys = slice(first, first := first + int(part.lengths[0]))
            part.k = [whole.k[0][keys].copy()]
            part.v = [whole.v[0][keys].copy()]
            for new, values in ((part.new_k, part.k), (part.new_v, part.v)):
                new.copy_(torch.from_numpy(values[0][-1:]))
            part.q.copy_(whole.q)
        (out, _), *found = ([one.double() for one in case.run(body) if one is not None] for case in (whole, *parts))
        weights = torch.stack([lse for _, lse in found]).softmax(0)
        merged = sum(weight[..., None] * part for weight, (part, _) in zip(weights, found, strict=True))
        near = max(TOLERANCE[dtype], 1e-6)  # lse has float32's precision
        torch.testing.assert_close(merged, out, rtol=near, atol=near)

    @pytest.mark.parametrize("window", [None, 100])
    def test_batch_invariant(self, window: int | None) -> None:
        """Where the card says so, in each dtype that is served: a query's result has the same bits alone and among
        others, its row in one step or in chunks or token by token, on any number of threads."""
        kind, invariant = "full" if window is None else "sliding", 0
        for dtype in DTYPES:
            form = Form(kind=kind, window=window, dtype=dtype, head_size=32)
            need = replace(form.need(self.device), batch_invariant=True)
            card = cast("type[AttentionCard]", self.subject().card)
            if self.subject().reasons(need) or need.kind not in card.kinds:
                continue
            invariant += 1
            whole = self.case(form, [[3], [640], range(5, 40), range(700)], 2)
            whole.need = replace(whole.need, batch_invariant=True)
            whole.layer = replace(whole.layer, need=whole.need)
            out, lse = whole.run(self._on_threads(dtype, 3))
            body, start = self._on_threads(dtype, 1), 0
            for row, places in enumerate(whole.rows):
                cuts = sorted({0, *(cut for cut in (1, 2, 50, 213, 640, 641) if cut < len(places)), len(places)})
                for first, last in pairwise(cuts):
                    got, sums = whole.part(row, first, last).run(body)
                    here = slice(start + first, start + last)
                    assert torch.equal(got, out[here]), f"queries {first} to {last} of row {row}, {dtype}"
                    assert sums is None or lse is None or torch.equal(sums, lse[here])
                start += len(places)
        if not invariant:
            self.require(replace(Form().need(self.device), batch_invariant=True))

    @classmethod
    def _on_threads(cls, dtype: str, threads: int) -> Any:
        """A body that is built where so many threads may compute."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return cls.built(lambda: worker_context(cls.subject(), cls.device, dtype), f"{dtype} {threads}")
        finally:
            torch.set_num_threads(before)

    def test_without_lse(self) -> None:
        """`lse` is not always asked for, and changes nothing."""
        self.require_lse(Form().need(self.device))
        case = self.case(Form(), MIXED, 2)
        out, lse = case.run(self.backend("float32"))
        again = self.case(Form(), MIXED, 2)
        cache = again.write_history(self.backend("float32"))
        alone = again.outputs()[0]
        plan = self.backend("float32").plan(again.batch, again.group)
        self.backend("float32").write(again.layer, again.new_k, again.new_v, cache, plan)
        self.backend("float32").forward(again.layer, again.q, again.new_k, again.new_v, cache, plan, alone)
        case.check(alone, lse)
        assert torch.equal(alone, out)

    # -- what is not seen --------------------------------------------------------------------------------------------
    @classmethod
    def unseen(cls, form: Form, rows: Rows, num_decodes: int, keys: Keys, **how: Any) -> None:
        """Run one step, compare it with the oracle, and run it again with some keys and values that are no numbers."""
        check_unseen(lambda: cls.case(form, rows, num_decodes, **how), cls.backend(form.dtype), keys)

    @pytest.mark.parametrize("window", [None, 9])
    def test_what_some_queries_do_not_see(self, window: int | None) -> None:
        """Keys and values that some of a row's queries see and others do not: later ones of a prompt or a chunk, and
        those that left the window. As NaN or infinity they change not a bit of the others' output (0 * NaN is NaN), in
        each dtype that is served."""
        kind = "full" if window is None else "sliding"
        keys, rows = [(0, 11), (0, 4), (1, 4), (2, 33)], [range(9, 12), range(5), range(64)]
        for form in self.served([Form(kind=kind, window=window, dtype=dtype) for dtype in DTYPES]):
            self.unseen(form, MIXED, 2, [(2, 22), (2, 7), (3, 12), (3, 31), (3, 38), (4, 32)], padding_tokens=2)
            self.unseen(replace(form, block_size=4), rows, 0, keys)

    def test_what_some_queries_do_not_see_of_long_rows(self) -> None:
        """Of rows that are computed in several pieces."""
        form = Form(num_kv_heads=1, group_size=2)
        rows: Rows = [[700], range(660, 700), range(300), range(3000, 3003)]
        self.unseen(form, rows, 1, [(1, 672), (1, 699), (2, 130), (2, 299), (3, 3002)])

    def test_what_lies_between_queries(self) -> None:
        """Keys between the places of a row's queries."""
        self.unseen(Form(), [[7], [0, 3, 4, 19], [12, 13, 40], range(5, 9)], 1, [(1, 2), (1, 10), (2, 30), (3, 8)])

    def test_what_some_queries_do_not_see_in_fp8(self) -> None:
        """In a cache of 8 bits."""
        forms = self.served([Form(dtype=dtype, kv_dtype="float8_e4m3fn") for dtype in ("bfloat16", "float32")])
        self.unseen(forms[0], MIXED, 2, [(2, 22), (3, 31), (4, 32)])

    def test_what_some_queries_do_not_see_in_int8(self) -> None:
        """The same of whole numbers."""
        forms = self.served([Form(dtype=dtype, kv_dtype="int8") for dtype in ("bfloat16", "float32")])
        self.unseen(forms[0], MIXED, 2, [(2, 22), (3, 31), (4, 32)])

    # -- plans -------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("window", [None, 9])
    def test_refilled_plan(self, window: int | None) -> None:
        """`plan(out=)` gives the same plan back, filled with the new step: longer rows, shorter ones, other pages."""
        form = Form(kind="full" if window is None else "sliding", window=window)
        steps: list[Rows] = [[[20], [5], [33]], [[41], [50], [34]], [[2], [6], [80]]]
        self._refill(form, steps, 3)

    def test_refilled_plan_of_prefills(self) -> None:
        """The same with several tokens a row."""
        self._refill(Form(), [[range(8), range(3, 11)], [range(30, 38), range(8)]], 0)

    @pytest.mark.parametrize("window", [None, 9])
    def test_refilled_plan_of_any_rows(self, window: int | None) -> None:
        """The same with others of other numbers of tokens, rows of none and tokens behind the last row."""
        form = Form(kind="full" if window is None else "sliding", window=window)
        self._refill_with(form, self._any_rows(form))

    def _any_rows(self, form: Form) -> list[Case]:
        """Steps of one captured form; skipped where the driver's are not captured."""
        level = self.backend(form.dtype).capture_level
        if level != "any":
            not_served(f"such steps of the driver are not captured: its capture_level is {level}")
        cases = []
        for seed, (rows, num_decodes) in enumerate(ANY_ROWS):
            padding = {"empty_rows": 24 - len(rows), "padding_tokens": 56 - sum(map(len, rows))}
            cases.append(self.case(form, rows, num_decodes, seed=seed, width=8, **padding))
        return cases

    def _refill(
        self, form: Form, steps: list[Rows], num_decodes: int, trees: Sequence[dict[int, Tree]] | None = None
    ) -> None:
        grown = [{"trees": of_step} for of_step in trees] if trees else [{} for _ in steps]
        cases = [
            self.case(form, rows, num_decodes, seed=i, width=8, **how)
            for i, (rows, how) in enumerate(zip(steps, grown, strict=True))
        ]
        self._refill_with(form, cases)

    def _refill_with(self, form: Form, cases: list[Case]) -> None:
        body, plan = self.backend(form.dtype), None
        batch = cases[0].batch
        for case in cases:
            cache = case.write_history(body)
            copy_into(batch, case.batch)  # the runner's buffers stay where they are, and so must what a plan names
            refilled = body.plan(batch, case.group, plan)
            assert plan is None or refilled is plan, "plan(out=) gave another plan"
            plan = refilled
            out, lse = case.outputs()
            case.launch(body, cache, plan, out, lse)
            case.check(out, lse)

    @pytest.mark.parametrize("window", [None, 9])
    def test_plans_by_launches(self, window: int | None) -> None:
        """Of a body that says `plans_by_launches`, a plan of rows of one token is right for later steps of which the
        host is told nothing: whole steps are captured, and it is refilled within."""
        kind = "full" if window is None else "sliding"
        form = self.served([Form(kind=kind, window=window, dtype=dtype) for dtype in DTYPES[1:]])[0]
        cases = [
            self.case(form, rows, len(rows), seed=seed, width=8, padding_rows=padding)
            for seed, (rows, padding) in enumerate(LAUNCHED)
        ]
        self.check_launched(cases)

    @classmethod
    def check_launched(cls, cases: Sequence[Case]) -> None:
        """Plan once and launch these steps; skipped where the body does not say `plans_by_launches`. Where the platform
        records them, the refill of the plan is recorded with the launch."""
        body = cls.backend(cases[0].form.dtype)
        if not getattr(body, "plans_by_launches", False):
            not_served("its plans are the host's: the body does not say plans_by_launches")
        recorder = platform_card_of(cls.device, Registry.discover()).recorder
        if recorder not in cast("type[AttentionCard]", cls.subject().card).captured_by:
            return check_plans_by_launches(cases, body)
        platform = worker_context(cls.subject(), cls.device).platform
        assert platform is not None

        def record(step: Callable[[], None]) -> Callable[[], None]:
            replay = platform.capture(step, CaptureKey(0, variant=("conformance",)))
            assert replay is not step, "the platform could not capture the refill, though the card names its recorder"
            return replay

        check_plans_by_launches(cases, body, record)

    @pytest.mark.parametrize("any_rows", [False, True], ids=["decodes", "any rows"])
    def test_captured_step(self, any_rows: bool) -> None:
        """What the platform records of a step is right for the steps after it, whose rows are longer and elsewhere, or
        others altogether."""
        steps: list[Rows] = [[[30], [16], [60], [38], [70]], DECODES, [[1], [2], [90], [16], [0]]]
        if any_rows:
            cases = self._any_rows(Form())
        else:
            cases = [self.case(Form(), rows, 5, seed=i, width=8) for i, rows in enumerate(steps)]
        body, first = self.backend("float32"), cases[0]
        if body.capture_level == "none":
            not_served("the driver's steps are not captured: its capture_level is none")
        require_capture(cast("type[AttentionCard]", self.subject().card).captured_by, self.device)
        platform = worker_context(self.subject(), self.device).platform
        assert platform is not None
        pool, (out, lse) = first.pool, first.outputs()
        cache = first.write_history(body)
        plan = body.plan(first.batch, first.group)
        step = functools.partial(first.launch, body, cache, plan, out, lse)
        replay = platform.capture(step, CaptureKey(0, variant=("conformance",)))
        assert replay is not step, "the platform could not capture the step, though the card names its recorder"
        for case in cases:
            case.write_history(body)
            pool[: len(case.pool)] = case.pool
            for mine, other in zip(first.tensors(), case.tensors(), strict=True):
                mine.copy_(other)
            copy_into(first.batch, case.batch)
            assert body.plan(first.batch, first.group, plan) is plan
            out.fill_(torch.nan)
            if lse is not None:
                lse.fill_(torch.nan)
            replay()
            case.check(out, lse)

    # -- layers that keep nothing ------------------------------------------------------------------------------------
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_encoder(self, dtype: str) -> None:
        """Each token of a row sees all of them. There is no cache; `write` is not called."""
        form = Form(kind="encoder", dtype=dtype)
        self.require(form.need(self.device))
        lse = self.gives_lse(form.need(self.device))
        case = whole_rows(form, (5, 1, 17, 40), self.device, padding=3, lse=lse)
        case.check(*case.run(self.backend(dtype)))

    def test_encoder_rows_are_apart(self) -> None:
        """What stands in other rows has no effect, NaN included."""
        form = Form(kind="encoder")
        self.require(form.need(self.device))
        lse = self.gives_lse(form.need(self.device))
        make = functools.partial(whole_rows, form, (5, 1, 17, 40), self.device, padding=3, lse=lse)
        check_unseen(make, self.backend("float32"), [(1, 0), (2, 0), (2, 16)])

    def test_encoder_with_everything(self) -> None:
        """Soft cap, sinks, and slopes by the distance to both sides."""
        form = Form(kind="encoder", soft_cap=2.0, sinks=True, alibi=True)
        self.require(form.need(self.device))
        case = whole_rows(form, (9, 1, 33), self.device, lse=self.gives_lse(form.need(self.device)))
        case.check(*case.run(self.backend("float32")))

    def test_encoder_with_relative_bias(self) -> None:
        """Keys behind a query and ahead of it have their own, far away that of the last one."""
        form = Form(kind="encoder", relative_bias=True)
        self.require(form.need(self.device))
        case = whole_rows(form, (9, 1, 150), self.device, lse=self.gives_lse(form.need(self.device)))
        case.check(*case.run(self.backend("float32")))

    @pytest.mark.parametrize("window", [1, 8, 200])
    def test_encoder_with_window(self, window: int) -> None:
        """Keys as far as a sliding window reaches, to both sides, and to whatever its tiles and blocks are."""
        form = Form(kind="encoder", window=window)
        self.require(form.need(self.device))
        lse = self.gives_lse(form.need(self.device))
        case = whole_rows(form, (5, 1, 17, 300, 8), self.device, padding=3, lse=lse)
        case.check(*case.run(self.backend("float32")))

    def test_encoder_with_window_is_blind_beyond(self) -> None:
        """What stands farther away in its own row has no effect on a token, NaN included."""
        form = Form(kind="encoder", window=6)
        self.require(form.need(self.device))
        lse = self.gives_lse(form.need(self.device))
        make = functools.partial(whole_rows, form, (5, 40, 150), self.device, padding=3, lse=lse)
        check_unseen(make, self.backend("float32"), [(1, 0), (1, 20), (2, 149)])

    # -- everything at once ------------------------------------------------------------------------------------------
    def test_ragged_batches(self) -> None:
        """Any rows of any form, as hypothesis finds them."""
        self._ragged(40)

    def _ragged(self, max_examples: int, kv_dtype: str | None = None) -> None:
        self.require(Form(kv_dtype=kv_dtype).need(self.device))

        @self.hypothesis_settings(max_examples)
        @given(forms(), batches())
        def check(form: Form, batch: dict[str, Any]) -> None:
            form = replace(form, kv_dtype=kv_dtype)
            plainer = replace(form, dtype="float32")
            for asked in (form, plainer, replace(plainer, sinks=False, alibi=False)):
                if not self.subject().reasons(asked.need(self.device, batch["rows"])):
                    return self.unseen(asked, **batch)

        check()

    # -- how fast ----------------------------------------------------------------------------------------------------
    @classmethod
    def figure(cls) -> str | None:
        """Decode steps over long rows: what of the memory's bandwidth is reached."""
        form = Form(num_kv_heads=4, group_size=2, head_size=64, dtype="bfloat16")
        if cls.subject().reasons(form.need(cls.device)):
            return cls.latent_figure()
        case = cls.case(form, [[1023]] * 4, 4)
        body = cls.backend("bfloat16")
        cache, (out, lse) = case.write_history(body), case.outputs()
        plan = body.plan(case.batch, case.group)
        seconds = median_seconds(lambda: case.launch(body, cache, plan, out, lse), cls.device)
        moved = 4 * 1024 * 4 * 64 * 2 * 2
        return (
            f"4 rows of 1,024 keys, 8/4 heads of 64, bfloat16: {seconds * 1e6:,.0f} us, "
            f"{moved / seconds / 1e9:.2f} GB/s of keys and values"
        )


class AttentionThorough(LatentThorough):
    """Mixed in before the suite: more of everything. Takes minutes.

    class TestMineThoroughly(AttentionThorough, AttentionConformance): ...
    """

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("window", [None, 33])
    @pytest.mark.parametrize("head_size", [32, 48, 64, 80, 96, 112, 128, 192, 256])
    def test_thorough_forms(self: Any, head_size: int, window: int | None, dtype: str) -> None:
        """Every dtype by head size by window, with grouped heads and blocks of several sizes."""
        for group_size, block_size in ((1, 16), (4, 32), (7, 64)):
            form = Form(
                kind="full" if window is None else "sliding", window=window, head_size=head_size, dtype=dtype,
                group_size=group_size, block_size=block_size,
            )  # fmt: skip
            self.verify(form, [[190], [64], range(130), range(100, 163)], 2)

    def test_thorough_ragged_batches(self: Any) -> None:
        """Hundreds of them."""
        self._ragged(600)

    @pytest.mark.parametrize("kv_dtype", CODES)
    def test_thorough_caches_of_8_bits(self: Any, kv_dtype: str) -> None:
        """Many of them."""
        self._ragged(200, kv_dtype)


def forms() -> st.SearchStrategy[Form]:
    """Layers of any form."""

    def made(window: int | None, **fields: Any) -> Form:
        return Form(kind="full" if window is None else "sliding", window=window, **fields)

    return st.builds(
        made,
        window=st.sampled_from([None, None, 1, 2, 3, 5, 16, 100]),
        num_kv_heads=st.sampled_from([1, 2, 3]),
        group_size=st.sampled_from([1, 2, 5]),
        head_size=st.sampled_from([16, 32, 64, 8, 12]),
        block_size=st.sampled_from([16, 32, 1, 2, 4, 7]),
        soft_cap=st.sampled_from([None, None, 0.5, 20.0]),
        dtype=st.sampled_from(["float64", "float32"]),
        sinks=st.sampled_from([False, False, True]),
        alibi=st.sampled_from([False, False, True]),
        spare_bytes=st.sampled_from([0, 64]),
    )
