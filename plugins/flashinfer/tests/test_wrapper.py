"""Driver `flashinfer` over FlashInfer's own wrapper, where it is installed: its Python as it is, and what it compiles
replaced by a double. So every argument and buffer goes the way that it goes on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

import flashinfer_cards
import torch
from flashinfer import prefill as flashinfer_prefill
from flashinfer_body import DoubleBody
from flashinfer_double import BatchPrefillWithPagedKVCacheWrapper as Double

from engine.interfaces.context import WorkerContext
from engine_flashinfer.staging import Staging
from engine_flashinfer.wrappers import LARGE_PLAN, Wrappers, load
from engine_sdk.conformance.attention.case import Case, Form
from engine_sdk.conformance.attention.suite import DECODES, MIXED
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.subject import Subject

CAUSAL, NHD = 1, 0
"""`flashinfer.utils.MaskMode` and `TensorLayout`."""


class Compiled:
    """What FlashInfer compiles for a form: `plan` and `paged_run`, called by position (csrc/batch_prefill.cu)."""

    def __init__(self, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self.dtypes = (q_dtype, kv_dtype)
        self.planned = {}

    def plan(self, *given: Any) -> int:
        floats, device, pinned, queries, pages, lengths, most_rows, rows, heads, kv_heads, page_size, fixed = given[:12]
        head_size, value_size, causal, window_left, split_size, undivided, colocated, uniform = given[12:]
        assert floats.dtype == device.dtype == pinned.dtype == torch.uint8 and device.numel() <= pinned.numel()
        assert (split_size, colocated, causal) == (-1, 0, True) and head_size == value_size
        assert rows == len(lengths) == len(pages) - 1 and most_rows >= int(queries[-1])
        assert uniform == 0 or fixed
        double = self.planned.get(device.data_ptr())
        if double is None or not fixed:
            double = self.planned[device.data_ptr()] = Double(floats, backend="fa2")
        double.plan(
            queries,
            pages,
            torch.empty(0, dtype=torch.int32),
            lengths - (pages.diff() - 1) * page_size,
            heads,
            kv_heads,
            head_size,
            page_size,
            causal=causal,
            window_left=window_left,
            q_data_type=self.dtypes[0],
            kv_data_type=self.dtypes[1],
            disable_split_kv=undivided,
        )
        return int(device.data_ptr())

    def paged_run(self, *given: Any) -> None:
        _, device, planned, q, k, v, queries, pages, indices, last, out, lse, mask, layout, window_left, pdl = given[
            :16
        ]
        cap, scale = given[22:24]
        double = self.planned[planned]
        assert planned == device.data_ptr() and (mask, layout, pdl) == (CAUSAL, NHD, False)
        assert given[16] is None and window_left == double._window_left, "no mask of the caller's own"
        double._qo_indptr_buf = queries
        double._paged_kv_indptr_buf = pages
        double._paged_kv_indices_buf = indices
        double._paged_kv_last_page_len_buf = last
        double._cap = cap
        double._sm_scale = scale
        _, sums = double.run(q, (k, v), out=out, return_lse=True)
        if lse is not None:
            lse.copy_(sums)


class RealWrapperBody(DoubleBody):
    def wrappers(self, context: WorkerContext, workspace_bytes: int) -> Wrappers:
        def pinned() -> torch.Tensor:
            return torch.empty(LARGE_PLAN, dtype=torch.uint8)

        workspace = torch.zeros(1 << 16, dtype=torch.uint8)
        return Wrappers(load(), workspace, Staging(pinned, Passed))


class Passed:
    """An event that the device has passed."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture
def body(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A body over FlashInfer's wrapper, on a machine without a GPU."""
    empty, compiled = torch.empty, {}

    def unpinned(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        return empty(*arguments, **keywords)

    def module(backend: str, q_dtype: torch.dtype, kv_dtype: torch.dtype, *rest: Any) -> Compiled:
        assert backend == "fa2" and rest[1] == torch.int32
        return compiled.setdefault((q_dtype, kv_dtype, rest), Compiled(q_dtype, kv_dtype))

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(flashinfer_prefill, "get_batch_prefill_module", module)
    monkeypatch.setattr(flashinfer_prefill, "device_support_pdl", lambda device: False)
    return RealWrapperBody(worker_context(Subject.of_card("attention", flashinfer_cards.DoubleFlashInfer, {})))


FORMS = {
    "plain": Form(dtype="bfloat16"),
    "window and soft cap": Form(kind="sliding", window=9, soft_cap=20.0, dtype="float16"),
    "sinks": Form(sinks=True, dtype="bfloat16"),
    "fp8": Form(dtype="bfloat16", kv_dtype="float8_e4m3fn"),
}
STEPS = {
    "decodes": (DECODES, 5),
    "drafts": ([range(30, 33), range(88, 91)], 0),
    "mixed": (MIXED, 2),
    "prompts": ([range(300), range(310, 610)], 0),
}


@pytest.mark.parametrize("bound", [0, 7])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("form", FORMS)
def test_each_sort_of_step(body: Any, form: str, steps: str, bound: int) -> None:
    rows, num_decodes = STEPS[steps]
    case = Case(FORMS[form], rows, num_decodes, 16, width=40, bound=bound)  # type: ignore[arg-type]
    case.check(*case.run(body))


def test_steps_after_a_captured_one(body: Any) -> None:
    """A refilled plan: FlashInfer's wrapper stays, and with it the memory that was captured."""
    cases = [
        Case(FORMS["plain"], rows, 3, 16, seed=i, width=8)
        for i, rows in enumerate(([[20], [5], [33]], [[41], [50], [4]]))
    ]
    batch, plan = cases[0].batch, None
    for case in cases:
        cache = case.write_history(body)
        for name, value in vars(case.batch).items():
            if isinstance(value, torch.Tensor):
                getattr(batch, name).copy_(value)
        batch.seq_lens_bound = case.batch.seq_lens_bound
        wrapper = None if plan is None else plan.wrapper
        plan = body.plan(batch, case.group, plan)
        assert wrapper in (None, plan.wrapper) and plan.wrapper.is_cuda_graph_enabled
        out, lse = case.outputs()
        case.launch(body, cache, plan, out, lse)
        case.check(out, lse)
