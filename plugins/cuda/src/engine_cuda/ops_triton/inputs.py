"""A step's inputs, read from the tables of tokens and blocks in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.interfaces.ops import StepInputs, StepTables
from engine.types.kv import NULL_PAGE

TOKENS = 128
"""Tokens of a program."""
ENTRIES = 2048
"""Entries of a block table that a program copies."""


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "token_programs", "chunks", "steps"])
def prepare_kernel(
    tokens, token_stride, tables, table_strides, widths, sizes, rows, inputs, block_tables, row_strides, slot_mappings,
    num_rows, num_tokens, token_programs, chunks, steps, TABLES: tl.constexpr, SINGLE: tl.constexpr,
    NULL: tl.constexpr, TOKENS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Grid: programs of TOKENS tokens, then for each row those that copy ENTRIES entries of each block table.

    rows: (slot_of_row, num_computed, query_start_loc, seq_lens). inputs: (token_ids, positions). tables, block_tables
    and slot_mappings are tuples of one pointer for each of the TABLES. SINGLE: every row has exactly one token and none
    is padding. After `steps` halvings of the rows none is left.
    """
    slot_of_row, num_computed, query_start_loc, seq_lens = rows
    token_ids, positions = inputs
    program = tl.program_id(0)
    if program < token_programs:
        offs_t = program * TOKENS + tl.arange(0, TOKENS)
        mask = offs_t < num_tokens
        if SINGLE:
            row, known = offs_t, mask
            position = tl.load(num_computed + row, mask=known, other=0).to(tl.int64)
        else:
            row, end = tl.zeros_like(offs_t), tl.zeros_like(offs_t) + num_rows
            for _ in range(steps):  # the first row that ends after the token
                middle = (row + end) // 2
                open_ = row < end
                before = tl.load(query_start_loc + 1 + middle, mask=open_, other=0) <= offs_t
                row, end = tl.where(open_ & before, middle + 1, row), tl.where(open_ & (before == 0), middle, end)
            known = mask & (row < num_rows)
            first = tl.load(query_start_loc + row, mask=known, other=0)
            position = (tl.load(num_computed + row, mask=known, other=0) + offs_t - first).to(tl.int64)
        position = tl.where(known, position, 0)
        slot = tl.load(slot_of_row + row, mask=known, other=0).to(tl.int64)
        tl.store(positions + offs_t, position, mask=mask)
        tl.store(token_ids + offs_t, tl.load(tokens + slot * token_stride + position, mask=known, other=0), mask=mask)
        for table in tl.static_range(TABLES):
            block = position // sizes[table]
            page = tl.load(tables[table] + slot * table_strides[table] + block, mask=known, other=NULL).to(tl.int64)
            tl.store(slot_mappings[table] + offs_t, (page - block) * sizes[table] + position, mask=mask)
    else:  # other names than above: a name has one type in both branches
        part = program - token_programs
        copied = part // chunks
        offs_n = part % chunks * ENTRIES + tl.arange(0, ENTRIES)
        source = tl.load(slot_of_row + copied).to(tl.int64)
        length = tl.load(seq_lens + copied)
        for table in tl.static_range(TABLES):
            mask_n = (offs_n < widths[table]) & (offs_n * sizes[table] < length)
            entries = tl.load(tables[table] + source * table_strides[table] + offs_n, mask=mask_n)
            tl.store(block_tables[table] + copied.to(tl.int64) * row_strides[table] + offs_n, entries, mask=mask_n)


class Inputs:
    """The operation `prepare_inputs`."""

    def prepare_inputs(self, tables: StepTables, inputs: StepInputs) -> None:
        """Fill `token_ids`, `positions`, `block_tables` and `slot_mappings` from the tables, in place."""
        rows, tokens, widths = len(inputs.slot_of_row), len(inputs.token_ids), [t.shape[1] for t in tables.blocks]
        token_programs, chunks = triton.cdiv(tokens, TOKENS), triton.cdiv(max(widths, default=0), ENTRIES)
        prepare_kernel[(token_programs + rows * chunks,)](
            tables.tokens, tables.tokens.stride(0), tables.blocks, tuple(t.stride(0) for t in tables.blocks),
            tuple(widths), tables.tokens_per_block,
            (inputs.slot_of_row, inputs.num_computed, inputs.query_start_loc, inputs.seq_lens),
            (inputs.token_ids, inputs.positions),
            inputs.block_tables, tuple(t.stride(0) for t in inputs.block_tables), inputs.slot_mappings, rows, tokens,
            token_programs, max(chunks, 1), rows.bit_length(), len(widths), rows == tokens, NULL_PAGE, TOKENS, ENTRIES,
        )  # fmt: skip
