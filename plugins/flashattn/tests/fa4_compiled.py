"""Compile FlashAttention 4 for the calls that `implementations.fa4` makes, for a GPU that is not there: the program of
`test_fa4_compiled.py`, told the architecture by FlashAttention's own variables.

Tensors are fake, of torch's kind: they have shapes and strides, and nothing is computed. Prints a line for each form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from flash_attn.cute.interface import _flash_attn_fwd
from torch._subclasses.fake_tensor import FakeTensorMode

from engine_flashattn.call import KernelCall
from engine_flashattn.implementations import fa4
from engine_flashattn.plan import FlashPlan


class Form(NamedTuple):
    """A step of rows alike."""

    size: int = 128
    q_heads: int = 32
    kv_heads: int = 8
    rows: int = 4
    queries: int = 1
    page: int = 16
    window: int = -1
    soft_cap: float = 0.0
    want_sums: bool = False


FORMS = {
    "decode": Form(),
    "decode with sums": Form(want_sums=True),
    "prompts": Form(queries=512),
    "a page for a tile": Form(queries=512, page=128),
    "window": Form(queries=8, window=127),
    "soft cap": Form(soft_cap=30.0),
    "heads of 64": Form(size=64, queries=64),
    "heads of 80": Form(size=80),
    "heads of 192": Form(size=192),
    "heads of 256": Form(size=256),
    "seven heads share one": Form(q_heads=56),
    "none shares": Form(q_heads=8, queries=300),
    "many rows": Form(rows=300),
}


def call_of(form: Form) -> KernelCall:
    """Pages hold three layers, and queries lie between keys and values, as in an engine."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def halves(*shape: int) -> torch.Tensor:
        return numbers(*shape, dtype=torch.bfloat16)

    tokens, elements = form.rows * form.queries, 2 * form.page * form.kv_heads * form.size
    both = halves(1000, 3 * elements)[:, elements : 2 * elements]
    both = both.unflatten(1, (2, form.page, form.kv_heads, form.size))
    plan = FlashPlan(
        num_rows=form.rows,
        num_tokens=tokens,
        row_tokens=form.queries,
        max_query_len=form.queries,
        max_seq_len=64 * form.page,
        query_start_loc=numbers(form.rows + 1),
        seq_lens=numbers(form.rows),
        key_start_loc=None,
        block_table=numbers(form.rows, 64),
        slot_mapping=numbers(tokens, dtype=torch.int64),
        kv_index=numbers(tokens, dtype=torch.int64),
    )
    return KernelCall(
        q=halves(tokens, form.q_heads + 2 * form.kv_heads, form.size)[:, : form.q_heads],
        k=both[:, 0],
        v=both[:, 1],
        out=halves(tokens, form.q_heads, form.size),
        plan=plan,
        encoder=False,
        scale=form.size**-0.5,
        window=form.window,
        soft_cap=form.soft_cap,
        alibi_slopes=None,
        num_splits=0,
        want_sums=form.want_sums,
    )


def main() -> None:
    attend: Any = fa4.bind(_flash_attn_fwd, divides=False)
    for name, form in FORMS.items():
        with FakeTensorMode(allow_non_fake_inputs=True):
            sums = attend(call_of(form))
        assert sums is None or sums.shape == (form.q_heads, form.rows * form.queries)
        assert (sums is None) != form.want_sums
        print(name, flush=True)


if __name__ == "__main__":
    main()
