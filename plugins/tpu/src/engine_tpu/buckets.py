"""The sizes of steps, and how a step's numbers travel to the device: as one array of int32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.types.plan import StepPlan

QUERIES = 16
"""Tokens of a block of queries, in steps whose rows have several."""
_FEWEST = 16
"""Rows and tokens of the smallest step that is no decode."""
_ALL_DRAW = 64
"""Steps of so few tokens have room for draws at each of them: constraints may force any number of tokens of a row."""
_SPARE_BLOCKS = 8
"""New pages that travel with a step, beside one for each row and table."""


class Bucket(NamedTuple):
    """A step's sizes.

    Args:
        rows, tokens, draws: up to which it is padded; draws are the positions at which tokens are drawn.
        decodes: each row has one token, and draws.
    """

    rows: int
    tokens: int
    draws: int
    decodes: bool

    @property
    def queries(self) -> int:
        """Tokens of one block of queries."""
        return 1 if self.decodes else QUERIES

    @property
    def blocks(self) -> int:
        """Blocks of queries, of rows that need not fill them."""
        return self.rows if self.decodes else -(-self.tokens // QUERIES) + self.rows


class Buckets:
    """All sizes that are compiled before the first request.

    Args:
        max_rows, max_tokens: of a step.
        rows: of decode steps; [] for powers of two.
        tokens: of others; [] for powers of two.
        drafts: that a row's drafter proposes at most; 0: there is none.
    """

    def __init__(
        self, max_rows: int, max_tokens: int, rows: Sequence[int], tokens: Sequence[int], drafts: int = 0
    ) -> None:
        self._drafts = drafts
        self._rows = _up_to(max_rows, rows or _powers(1, max_rows))
        most = max(max_tokens, self._rows[-1])
        self._tokens = _up_to(most, tokens or _powers(_FEWEST, most))
        self._mixed_rows = sorted({min(_FEWEST, self._rows[-1]), self._rows[-1]})

    def __iter__(self) -> Iterator[Bucket]:
        """The largest first: what it needs of memory is known early."""
        sizes = [
            Bucket(rows, tokens, draws, False) for rows, tokens in self._mixed() for draws in self._draws(rows, tokens)
        ]
        sizes += [Bucket(rows, rows, rows, True) for rows in self._rows]
        return iter(sorted(sizes, key=lambda size: (-size.tokens, -size.rows, -size.draws)))

    def _mixed(self) -> Iterator[tuple[int, int]]:
        for tokens in self._tokens:
            for rows in self._mixed_rows:
                if rows <= tokens or rows == self._mixed_rows[0]:
                    yield rows, tokens

    def _draws(self, rows: int, tokens: int) -> list[int]:
        """Sizes, ascending: one draw for each row; with a drafter, and with the most rows, also more, for drafts, and
        for tokens that constraints force."""
        if tokens <= _ALL_DRAW:
            return [tokens]
        more = min(tokens, max(_ALL_DRAW, (1 + max(1, self._drafts)) * rows))
        return sorted({rows, more}) if self._drafts or rows == self._mixed_rows[-1] else [rows]

    def of(self, num_rows: int, num_tokens: int, num_draws: int, decodes: bool) -> Bucket:
        """The smallest bucket for a step; one that is not among these where none has room for so many draws."""
        if decodes:
            rows = _least(self._rows, num_rows)
            return Bucket(rows, rows, rows, True)
        tokens = _least(self._tokens, num_tokens)
        rows = next((rows for rows in self._mixed_rows if rows >= num_rows), self._mixed_rows[-1])
        if rows > tokens:
            tokens = _least(self._tokens, rows)
        sizes = self._draws(rows, tokens)
        if sizes[-1] < num_draws:
            rows = self._mixed_rows[-1]
            tokens = max(tokens, _least(self._tokens, rows))
            sizes = self._draws(rows, tokens)
        draws = next((size for size in sizes if size >= num_draws), sizes[-1])
        while draws < num_draws:
            draws *= 2
        return Bucket(rows, tokens, min(draws, tokens), False)


def _powers(first: int, last: int) -> list[int]:
    return [size for size in (1 << bit for bit in range(last.bit_length() + 1)) if first <= size < 2 * last]


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Those that are below, and one that holds the most."""
    return [*(size for size in sizes if size < most), next((size for size in sizes if size >= most), most)]


def _least(sizes: Sequence[int], size: int) -> int:
    return next(one for one in sizes if one >= size)


class Packing:
    """Where each of a step's arrays stands in the one that travels.

    Args:
        bucket: the step's.
        num_tables: of the KV cache.
        page_size: tokens of a page.
        scratch: the slot of what is padding.
    """

    def __init__(self, bucket: Bucket, num_tables: int, page_size: int, scratch: int) -> None:
        self._scratch = scratch
        self.new_blocks = num_tables * (bucket.rows + _SPARE_BLOCKS)
        sizes = {"slot": bucket.rows}
        if bucket.decodes:
            sizes |= {"position": bucket.rows}
        else:
            sizes |= dict.fromkeys(("token_slot", "token_position", "token_place"), bucket.tokens)
            sizes |= dict.fromkeys(("block_row", "block_first", "block_count", "block_position"), bucket.blocks)
            pieces = bucket.tokens // page_size + 2 * bucket.rows
            sizes |= dict.fromkeys(("piece_row", "piece_index", "piece_token", "piece_low", "piece_high"), pieces)
            sizes |= {"select": bucket.draws}
        sizes |= dict.fromkeys(("new_table", "new_slot", "new_index", "new_page"), self.new_blocks)
        sizes |= drawing_sizes(bucket.draws)
        self._places = _placed(sizes)
        self.drawing = slice(self._places["flags"].start, self._places[SAMPLED[-1]].stop)
        """What the drawing reads of it, which no bucket's other sizes change."""

    def array(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A new array of padding, and views of its parts."""
        packed = np.zeros(self.drawing.stop, np.int32)
        views = self.views(packed)
        for name in ("slot", "token_slot", "draw_slot", "new_slot"):
            if name in views:
                views[name][:] = self._scratch
        return packed, views

    def views(self, packed: Any) -> dict[str, Any]:
        """Its parts, of an array of numpy's or of JAX's."""
        return {name: packed[place] for name, place in self._places.items()}


def drawing_sizes(draws: int) -> dict[str, int]:
    """The parts of what the drawing reads, and how long each is."""
    return {"flags": 4, **dict.fromkeys(SAMPLED, draws)}


def drawing_views(packed: Any, draws: int) -> dict[str, Any]:
    """Its parts."""
    return {name: packed[place] for name, place in _placed(drawing_sizes(draws)).items()}


def _placed(sizes: dict[str, int]) -> dict[str, slice]:
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = slice(end, end + size)
        end += size
    return places


SAMPLED = (
    *("draw_slot", "draw_place", "num_prompt", "temperature", "top_p", "min_p", "presence", "frequency"),
    *("repetition", "top_k", "seed_low", "seed_high"),
)
"""The parts of `engine_tpu.sampling.SampledRows`, in its order."""


def fill_tokens(views: dict[str, np.ndarray], plan: StepPlan, bucket: Bucket, page_size: int) -> None:
    """The parts that say which tokens a plan computes, and where they go."""
    rows, computed = plan.num_rows, plan.num_computed
    views["slot"][:rows] = plan.slot_of_row
    if bucket.decodes:
        views["position"][:rows] = computed
        return
    counts = plan.num_tokens
    starts = np.cumsum(counts) - counts
    row = np.repeat(np.arange(rows), counts)
    offset = np.arange(len(row)) - starts[row]
    total = len(row)
    views["token_slot"][:total] = plan.slot_of_row[row]
    views["token_position"][:total] = computed[row] + offset
    of_row, nth = _pieces(-(-counts // QUERIES))
    blocks = len(of_row)
    views["block_row"][:blocks] = of_row
    views["block_first"][:blocks] = starts[of_row] + nth * QUERIES
    views["block_count"][:blocks] = np.minimum(counts[of_row] - nth * QUERIES, QUERIES)
    views["block_position"][:blocks] = computed[of_row] + nth * QUERIES
    before = np.cumsum(-(-counts // QUERIES)) - -(-counts // QUERIES)
    views["token_place"][:total] = (before[row] + offset // QUERIES) * QUERIES + offset % QUERIES
    first_page, end = computed // page_size, computed + counts
    of_row, nth = _pieces((end - 1) // page_size - first_page + 1)
    pieces, index = len(of_row), first_page[of_row] + nth
    begin = index * page_size
    views["piece_row"][:pieces] = of_row
    views["piece_index"][:pieces] = index
    views["piece_token"][:pieces] = starts[of_row] + begin - computed[of_row]
    views["piece_low"][:pieces] = np.maximum(computed[of_row] - begin, 0)
    views["piece_high"][:pieces] = np.minimum(end[of_row] - begin, page_size)


def _pieces(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows with so many pieces each: the row of each piece, and which of its row's it is."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
