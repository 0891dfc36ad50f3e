"""The part of the suite of point `attention` that is about latent attention (kind "mla")."""

from __future__ import annotations

import functools
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.attention import AttentionCard
from engine.interfaces.platform import CaptureKey
from engine_sdk.conformance.attention.case import (
    Form,
    Keys,
    Rows,
    batches,
    check_shares,
    check_unseen,
    copy_into,
)
from engine_sdk.conformance.attention.latent_case import LatentCase, latent_form
from engine_sdk.conformance.base import not_served
from engine_sdk.conformance.contexts import require_capture, worker_context
from engine_sdk.conformance.timing import median_seconds

DTYPES = ("float64", "float32", "bfloat16", "float16")
DECODES: Rows = [[0], [15], [16], [37], [5]]
MIXED: Rows = [[20], [33], range(23), range(17, 40), range(31, 33)]
"""Two decodes, a whole prompt, a later chunk of one, and a short extend."""
LAUNCHED: list[tuple[Rows, int]] = [([[20], [7], [33]], 0), ([[1], [40]], 1), ([[0], [15], [16]], 0)]
"""Steps of three rows of one token: the rows, and how many more pad them. The first has the most pages."""


class LatentTests:
    """Latent attention against a dense float64 oracle. Mixed into `AttentionConformance`."""

    @classmethod
    def latent_case(cls: Any, form: Form, rows: Rows, num_decodes: int, **how: Any) -> LatentCase:
        """A step of these rows; skipped with the card's reasons where it serves no such layer."""
        need = form.need(cls.device, rows if "share" not in how else [[-1]])
        cls.require(need)
        per_page = cast("type[AttentionCard]", cls.subject().card).tokens_per_page(need)
        lse = cls.gives_lse(need)
        return LatentCase(form, rows, num_decodes, per_page * form.blocks, device=cls.device, lse=lse, **how)

    @classmethod
    def verify_latent(cls: Any, form: Form, rows: Rows, num_decodes: int, **how: Any) -> None:
        """Run one step and compare it with the oracle."""
        case = cls.latent_case(form, rows, num_decodes, **how)
        case.check(*case.run(cls.backend(form.dtype)))

    # -- one property each -------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_latent_rows(self, dtype: str) -> None:
        """Decodes alone, whole prompts alone, and all kinds of rows in one step."""
        form = latent_form(dtype=dtype)
        self.verify_latent(form, DECODES, 5)
        self.verify_latent(form, [range(1), range(16), range(45)], 0)
        self.verify_latent(form, MIXED, 2)

    def test_latent_forms_of_one_kind(self: Any) -> None:
        """Layers may differ in heads and sizes: what holds for one form holds for no other."""
        forms = [
            latent_form(num_q_heads=2),
            latent_form(num_q_heads=40),
            latent_form(num_q_heads=4, latent_size=64, rope_size=16),
        ]
        self.verify_together([self.latent_case(form, MIXED, 2, seed=seed) for seed, form in enumerate(forms)])

    @pytest.mark.parametrize(("latent_size", "rope_size"), [(16, 4), (24, 8), (64, 64), (512, 64)])
    def test_latent_sizes(self, latent_size: int, rope_size: int) -> None:
        """Of the latent and of the rotated key: those of models, and small ones."""
        rows: Rows = [[20], range(7)] if latent_size > 64 else MIXED
        form = latent_form(num_q_heads=2, latent_size=latent_size, rope_size=rope_size)
        self.verify_latent(form, rows, 1 if latent_size > 64 else 2)

    @pytest.mark.parametrize("num_q_heads", [1, 3, 16, 40])
    def test_latent_heads(self, num_q_heads: int) -> None:
        """Any number of query heads shares the vectors; a rank may have few."""
        self.verify_latent(latent_form(num_q_heads=num_q_heads), [[20], [3], range(5), range(9, 11)], 2)

    @pytest.mark.parametrize("block_size", [1, 4, 16, 64])
    def test_latent_block_sizes(self, block_size: int) -> None:
        """Tables are followed, whatever a block holds; a block may be a multiple of the unit."""
        self.verify_latent(latent_form(block_size=block_size), MIXED, 2)
        self.verify_latent(latent_form(block_size=block_size, blocks=2), MIXED, 2)

    def test_latent_kv_index(self) -> None:
        """At some of a row's places: a query sees the vectors up to its own place."""
        self.verify_latent(latent_form(), [[7], [0, 3, 4, 19], [12, 13, 40], range(5, 9)], 1)

    def test_latent_what_sees_nothing(self) -> None:
        """At kv_index -1: out is 0 and lse -inf; alone, and beside queries of the row that see vectors."""
        for dtype in ("float64", "float32"):
            form = latent_form(dtype=dtype)
            if not cast(Any, self).subject().reasons(form.need(cast(Any, self).device, [[-1]])):
                self.verify_latent(form, [[-1], [20], [-1], [-1, -1, 0, 1], [-1, -1], range(9, 30)], 3)
                self.verify_latent(form, [[-1], [-1, -1]], 1)
        cast(Any, self).require(latent_form().need(cast(Any, self).device, [[-1]]))

    @pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
    def test_latent_keys_on_several_ranks(self, dtype: str) -> None:
        """Ranks that have each n-th vector of a row, and all its queries, put together by lse."""
        rows: Rows = [[7], [0], [40], range(5), range(9, 30)]
        make = functools.partial(self.latent_case, rows=rows, num_decodes=3)
        check_shares(lambda form, **how: make(form, **how), cast(Any, self).backend, latent_form(dtype=dtype))

    def test_latent_views(self) -> None:
        """Queries, latents and rotated keys are views of wider tensors, as models cut them."""
        self.verify_latent(latent_form(), MIXED, 2, strided=True)
        self.verify_latent(latent_form(), DECODES, 5, strided=True)

    def test_latent_padding(self) -> None:
        """Rows that fill a bucket, and tokens after the last row: their output is finite."""
        self.verify_latent(latent_form(), DECODES, 5, padding_rows=3)
        self.verify_latent(latent_form(), MIXED, 2, padding_tokens=5)

    def test_latent_lengths_that_are_bounded_only(self) -> None:
        """`seq_lens_bound` may say more than `seq_lens`."""
        self.verify_latent(latent_form(), DECODES, 5, bound=4)
        self.verify_latent(latent_form(), MIXED, 2, bound=19)

    def test_latent_reading_back(self) -> None:
        """Vectors can be read, as they were stored, in their two parts."""
        me = cast(Any, self)
        for form in me.served([latent_form(dtype=dtype) for dtype in DTYPES]):
            self.latent_case(form, MIXED, 2).check_read(me.backend(form.dtype))

    def test_latent_narrower_cache(self) -> None:
        """Vectors are rounded to the cache's dtype when they are written."""
        self.verify_latent(latent_form(dtype="float32", kv_dtype="bfloat16"), MIXED, 2)

    def test_latent_fp8_cache(self) -> None:
        """A byte an element (e4m3, with scales of 1), under queries of each dtype that is served: of each the first."""
        me = cast(Any, self)
        for dtype in ("bfloat16", "float16", "float32"):
            form = latent_form(dtype=dtype, kv_dtype="float8_e4m3fn")
            if not me.subject().reasons(form.need(me.device)):
                return self.verify_latent(form, MIXED, 2)
        me.require(latent_form(kv_dtype="float8_e4m3fn").need(me.device))

    def test_latent_long_and_many_rows(self) -> None:
        """Beyond what one piece of work holds: partial results are put together. And more rows than cores."""
        form = latent_form(num_q_heads=2)
        self.verify_latent(form, [[3000], [3], [1501]], 3)
        self.verify_latent(form, [[2995], range(660, 700)], 1)
        self.verify_latent(form, [[7 * i % 61] for i in range(70)], 70)

    def test_latent_large_scores(self) -> None:
        """Scores in the hundreds neither overflow nor become 0 / 0."""
        case = self.latent_case(latent_form(), MIXED, 2, strided=True)
        case.q *= 100  # of a score of a thousand, float32 itself leaves off what the tolerance would see
        case.check(*case.run(cast(Any, self).backend("float32")))

    def test_latent_without_lse(self) -> None:
        """`lse` is not always asked for, and changes nothing."""
        me = cast(Any, self)
        me.require_lse(latent_form().need(me.device))
        case, again = (self.latent_case(latent_form(), MIXED, 2) for _ in range(2))
        body = cast(Any, self).backend("float32")
        out, lse = case.run(body)
        alone, cache = again.outputs()[0], again.write_history(body)
        again.launch(body, cache, body.plan(again.batch, again.group), alone, None)
        again.check(alone, lse)
        assert torch.equal(alone, out)

    def test_latent_padded_drafts(self) -> None:
        """Rows of fewer drafts are filled up in captured steps: tokens on the null page, at places that nobody wrote
        (NaN here), whose own output nobody reads. They leave that of the row's other tokens alone."""
        rows: Rows = [range(30, 33), range(16, 19), range(3)]
        whole, padded = (self.latent_case(latent_form(), rows, 0) for _ in range(2))
        body = cast(Any, self).backend("float32")
        if body.capture_level in ("none", "decode"):
            not_served(f"no rows are padded for it: its capture_level is {body.capture_level}")
        expected, lse = whole.run(body)
        whole.check(expected, lse)
        padded.batch.slot_mapping[[4, 5, 8]] = 0
        padded.batch.kv_index[[4, 5, 8]] = -1
        out, total = padded.run(body)
        own = [0, 1, 2, 3, 6, 7]
        torch.testing.assert_close(out[own], expected[own], rtol=1e-5, atol=1e-5)
        if lse is not None and total is not None:
            torch.testing.assert_close(total[own], lse[own], rtol=1e-5, atol=1e-5)

    # -- what is not seen --------------------------------------------------------------------------------------------
    @classmethod
    def unseen_latent(cls: Any, form: Form, rows: Rows, num_decodes: int, keys: Keys, **how: Any) -> None:
        """Run one step, compare it with the oracle, and run it again with some vectors that are no numbers."""
        check_unseen(lambda: cls.latent_case(form, rows, num_decodes, **how), cls.backend(form.dtype), keys)

    def test_latent_what_some_queries_do_not_see(self) -> None:
        """Later vectors of a prompt or a chunk. As NaN or infinity they change not a bit of the output of queries
        before them (0 * NaN is NaN), in each dtype that is served."""
        for form in cast(Any, self).served([latent_form(dtype=dtype) for dtype in DTYPES]):
            self.unseen_latent(form, MIXED, 2, [(2, 22), (2, 7), (3, 31), (3, 38), (4, 32)], padding_tokens=2)

    def test_latent_what_some_queries_do_not_see_of_long_rows(self) -> None:
        """Of rows that are computed in several pieces."""
        form = latent_form(num_q_heads=2)
        self.unseen_latent(form, [[700], range(660, 700), range(2000, 2003)], 1, [(1, 672), (1, 699), (2, 2002)])

    def test_latent_what_lies_between_queries(self) -> None:
        """Vectors between the places of a row's queries; and one of many, where a row is divided."""
        self.unseen_latent(latent_form(num_q_heads=2), [[1500], [3], [7]], 3, [(0, 5)])
        self.unseen_latent(latent_form(), [[7], [0, 3, 4, 19], [12, 13, 40]], 1, [(1, 2), (1, 10), (2, 30)])

    # -- plans -------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("rows", ["decodes", "prefills"])
    def test_latent_refilled_plan(self, rows: str) -> None:
        """`plan(out=)` gives the same plan back, filled with the new step: longer rows, shorter ones, other pages."""
        decodes: list[Rows] = [[[20], [5], [33]], [[41], [50], [34]], [[2], [6], [80]]]
        prefills: list[Rows] = [[range(8), range(3, 11)], [range(30, 38), range(8)]]
        steps = decodes if rows == "decodes" else prefills
        plan = None
        cases = [
            self.latent_case(latent_form(), step, 3 if rows == "decodes" else 0, seed=i, width=8)
            for i, step in enumerate(steps)
        ]
        body, batch = cast(Any, self).backend("float32"), cases[0].batch
        for case in cases:
            cache = case.write_history(body)
            copy_into(batch, case.batch)  # the runner's buffers stay where they are, and so must what a plan names
            refilled = body.plan(batch, case.group, plan)
            assert plan is None or refilled is plan, "plan(out=) gave another plan"
            plan = refilled
            out, lse = case.outputs()
            case.launch(body, cache, plan, out, lse)
            case.check(out, lse)

    def test_latent_plans_by_launches(self) -> None:
        """The same of rows of one token, whose new step the host is not told."""
        me, form = cast(Any, self), latent_form()
        cases = [
            self.latent_case(form, rows, len(rows), seed=seed, width=8, padding_rows=padding)
            for seed, (rows, padding) in enumerate(LAUNCHED)
        ]
        me.check_launched(cases)

    def test_latent_captured_step(self) -> None:
        """What the platform records of decodes is right for the steps after it, whose rows are longer and elsewhere."""
        self._captured([[[30], [16], [60], [38], [70]], DECODES, [[1], [2], [90], [16], [0]]], 5, ("none",))

    def test_latent_captured_drafts(self) -> None:
        """The same with as many tokens in every row: a decode with drafts, each of which sees one vector more."""
        steps: list[Rows] = [
            [range(30, 33), range(16, 19), range(3)],
            [range(3), range(61, 64), range(15, 18)],
            [range(90, 93), range(1, 4), range(40, 43)],
        ]
        self._captured(steps, 0, ("none", "decode"))

    def _captured(self, steps: list[Rows], num_decodes: int, too_low: tuple[str, ...]) -> None:
        cases = [self.latent_case(latent_form(), rows, num_decodes, seed=i, width=8) for i, rows in enumerate(steps)]
        cases.sort(key=lambda case: -len(case.pool))  # the first one's pages take the others' as well
        me = cast(Any, self)
        body, first = me.backend("float32"), cases[0]
        if body.capture_level in too_low:
            not_served(f"such steps of the driver are not captured: its capture_level is {body.capture_level}")
        require_capture(cast("type[AttentionCard]", me.subject().card).captured_by, me.device)
        platform = worker_context(me.subject(), me.device).platform
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

    # -- everything at once ------------------------------------------------------------------------------------------
    def test_latent_ragged_batches(self) -> None:
        """Any rows of any form, as hypothesis finds them."""
        self._latent_ragged(15)

    def _latent_ragged(self, max_examples: int) -> None:
        me = cast(Any, self)
        me.require(latent_form().need(me.device))
        limited: settings = me.hypothesis_settings(max_examples)

        @limited
        @given(st.data())
        def check(data: st.DataObject) -> None:
            form, batch = data.draw(latent_forms()), data.draw(batches())
            if me.subject().reasons(form.need(me.device, batch["rows"])):
                form = latent_form()
            me.require(form.need(me.device, batch["rows"]))
            self.unseen_latent(form, **batch)

        check()

    # -- how fast ----------------------------------------------------------------------------------------------------
    @classmethod
    def latent_figure(cls: Any) -> str | None:
        """Decode steps over long rows: what of the memory's bandwidth is reached."""
        form = latent_form(num_q_heads=16, latent_size=512, rope_size=64, dtype="bfloat16")
        if cls.subject().reasons(form.need(cls.device)):
            return None
        case = cls.latent_case(form, [[1023]] * 4, 4)
        body = cls.backend("bfloat16")
        cache, (out, lse) = case.write_history(body), case.outputs()
        plan = body.plan(case.batch, case.group)
        seconds = median_seconds(lambda: case.launch(body, cache, plan, out, lse), cls.device)
        return (
            f"4 rows of 1,024 vectors of 512 + 64, 16 heads, bfloat16: {seconds * 1e6:,.0f} us, "
            f"{4 * 1024 * 576 * 2 / seconds / 1e9:.2f} GB/s of vectors"
        )


class LatentThorough:
    """More of latent attention. Mixed into `AttentionThorough`."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("num_q_heads", [8, 16, 32, 64, 128])
    def test_thorough_latent_forms(self: Any, num_q_heads: int, dtype: str) -> None:
        """DeepSeek's sizes with the heads that a rank may have."""
        form = latent_form(num_q_heads=num_q_heads, latent_size=512, rope_size=64, block_size=32, dtype=dtype)
        self.verify_latent(form, [[190], [64], range(70), range(100, 105)], 2)

    def test_thorough_latent_ragged_batches(self: Any) -> None:
        """Hundreds of them."""
        self._latent_ragged(300)


def latent_forms() -> st.SearchStrategy[Form]:
    """Layers of any form."""
    return st.builds(
        latent_form,
        num_q_heads=st.sampled_from([1, 2, 5, 17]),
        latent_size=st.sampled_from([16, 8, 12, 48]),
        rope_size=st.sampled_from([8, 2, 16]),
        block_size=st.sampled_from([16, 32, 1, 2, 4, 7]),
        dtype=st.sampled_from(["float64", "float32"]),
        spare_bytes=st.sampled_from([0, 64]),
    )
