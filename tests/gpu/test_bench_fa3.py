"""What of `tests.gpu.bench_fa3` needs no GPU: its steps, its pages, and that it tells right numbers from wrong ones."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.gpu.bench_fa3 import KV_HEADS, MB, SIZE, Step, Variant, variants, works
from tests.gpu.environment import variables
from tests.gpu.parts import run
from tests.gpu.rows import told


def test_what_a_step_reads_and_computes() -> None:
    alone, many, prompt, mixed = works(1)
    assert alone.read == 8000 * 2 * 8 * 128 * 2 and many.read == 256 * 1000 * 4096
    assert prompt.operations == 4 * 32 * 128 * 8192 * 8193 / 2
    assert mixed.tokens == 2048 + 64 and [str(v) for v in variants("triton", mixed)] == [
        "triton, pages of 16, 2,048 KiB apart"
    ]
    strides = [variant.stride for variant in variants("triton", alone)]
    assert strides == [2 * MB, 0, 2 * MB + 65536], "as the engine lays pages, a pool a layer, and apart from both"


def test_wrong_numbers_are_told() -> None:
    """Zeros, NaN in a row that is not looked at closely, and one key too many are no answer."""
    work = works(128)[3]
    step = Step(work, Variant("triton", stride=2 * MB), "cpu", 1)
    right = torch.empty_like(step.q)
    starts, first = step.batch.query_start_loc_host.tolist(), 0
    for row, (queries, keys) in enumerate(work.rows):
        k, v = (x[first : first + keys].double().repeat_interleave(4, dim=1) for x in (step.k, step.v))
        scores = torch.einsum("qhd,khd->hqk", step.q[starts[row] : starts[row + 1]].double(), k) * SIZE**-0.5
        hidden = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
        found = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        right[starts[row] : starts[row + 1]] = found.bfloat16()
        first += keys
    assert step.error(right) < 0.2
    assert step.error(torch.zeros_like(right)) > 1
    last = right.clone()
    last[-2] = right[-1]
    assert step.error(last) > 1
    right[0, 5, 3] = torch.nan
    assert step.error(right) == float("inf")
    assert all(pages.view(torch.bfloat16).isnan().all() for pages in step.pools)
    assert step.pools[0].shape[1] == 2 * 16 * KV_HEADS * SIZE * 2


@pytest.mark.slow
def test_attention_side_by_side() -> None:
    """In Triton's interpreter: our driver is right in every form, and each library has its rows."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.gpu.bench_fa3", "--device", "cpu", "--divide", "128", "--cold-bytes", "1"]
    outcome = run([*command, "--seconds", "60"], 140, {**variables(None), "TRITON_INTERPRET": "1"})
    assert outcome.status == 0, outcome.lines
    rows, _ = told(outcome.lines)
    ours = [row for row in rows if ": triton" in row.what]
    assert len(ours) == 8 and all("tolerances from float64" in row.result for row in ours)
    assert len(rows) - len(ours) == 10
