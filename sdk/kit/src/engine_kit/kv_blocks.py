"""A request's blocks: which of them are wanted, and how long a prefix can be had. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from engine.interfaces.kv_connector import Pages, Transferable
from engine.types.kv import NULL_PAGE, KVLayout, KVTable

_ASKED_AT_ONCE = 256

Has = Callable[[KVTable, Sequence[bytes]], Iterable[bool]]
"""Whether blocks of a table are there, by their keys (`Transferable.block_keys`). Of an iterator no more is taken than
is needed."""


class Block(NamedTuple):
    """A whole block of a request in one table.

    Args:
        number: counted from the request's start.
        page: which holds it, or is to.
        key: see `Transferable.block_keys`.
    """

    table: KVTable
    number: int
    page: int
    key: bytes


def whole_blocks(layout: KVLayout, request: Transferable, pages: Sequence[Pages], start: int, end: int) -> list[Block]:
    """Of these pages, those of whole blocks of tokens start .. end - 1, table after table."""
    found: list[Block] = []
    for part in pages:
        table = layout.tables[part.table]
        keys = request.block_keys(part.table)
        first = max(-(-start // layout.block_size), part.first_block)
        last = min(end // layout.block_size, part.first_block + len(part.pages), len(keys))
        for number in range(first, last):
            page = int(part.pages[number - part.first_block])
            if page != NULL_PAGE:
                found.append(Block(table, number, page, keys[number]))
    return found


def first_seen(table: KVTable, position: int) -> int:
    """The first block that a query at this position sees."""
    return 0 if table.window is None else max(0, position - table.window + 1) // table.tokens_per_block


def keys_to_find(layout: KVLayout, request: Transferable) -> list[list[bytes]]:
    """Of each table, the keys of blocks that are worth finding."""
    blocks = request.num_loadable // layout.block_size
    return [request.block_keys(table.index)[:blocks] for table in layout.tables]


def longest_prefix(layout: KVLayout, keys: Sequence[Sequence[bytes]], num_local: int, has: Has) -> int:
    """Tokens of the longest prefix of whole blocks that can be had: its first `num_local` tokens are in the pool, and
    of the others all are there, of a sliding table those that the token behind it sees.

    keys: of each table, as far as the prefix may go.
    """
    first = num_local // layout.block_size
    end = max(first, min(map(len, keys), default=0))
    tables = list(zip(layout.tables, keys, strict=True))
    for table, of_table in tables:
        if table.window is None:
            end = _row(table, of_table, first, end, has)
    fits = np.ones(end - first + 1, bool)  # whether the prefix may have `first` blocks, one more, ...
    for table, of_table in tables:
        if table.window is not None:
            fits &= np.fromiter(_windows(table, of_table[first:end], first, has), bool, fits.size)
    return (first + int(np.flatnonzero(fits)[-1])) * layout.block_size


def _row(table: KVTable, keys: Sequence[bytes], first: int, end: int, has: Has) -> int:
    """The first block that is not there; `end` where all are."""
    for start in range(first, end, _ASKED_AT_ONCE):
        for number, there in enumerate(has(table, keys[start : min(end, start + _ASKED_AT_ONCE)]), start):
            if not there:
                return number
    return end


def _windows(table: KVTable, keys: Sequence[bytes], first: int, has: Has) -> Iterator[bool]:
    """Whether all is there, or in the pool, that a token sees behind block first - 1, behind block first, ..."""
    row = 0
    yield True
    for number, there in enumerate(has(table, keys), first + 1):
        row = row + 1 if there else 0
        yield row >= number - max(first, first_seen(table, number * table.tokens_per_block))
