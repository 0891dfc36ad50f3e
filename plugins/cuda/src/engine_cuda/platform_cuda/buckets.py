"""The numbers of rows for which a decode step is captured."""

from __future__ import annotations

from collections.abc import Sequence

MOST_TOKENS = 512
"""Of a captured step, unless more are asked for. It takes so long with more that launching it is the least."""
_FIRST = (1, 2, 4)
_FINE = 256
"""Up to so many rows every 8th number, then every 16th: of more rows at most one in 16 is padding."""


def row_buckets(max_num_seqs: int, asked: Sequence[int] | None = None, tokens_per_row: int = 1) -> tuple[int, ...]:
    """Ascending; the last one that a step of `max_num_seqs` rows fits into is the only one as large.

    Args:
        max_num_seqs: rows of the largest step.
        asked: these, instead of the usual ones.
        tokens_per_row: a row's last token and its drafts.
    """
    if asked is None:
        most = MOST_TOKENS // tokens_per_row
        usual = (*_FIRST, *range(8, _FINE, 8), *range(_FINE, MOST_TOKENS + 1, 16), max_num_seqs)
        asked = [rows for rows in usual if rows <= most]
    numbers = sorted(set(asked))
    return (*(n for n in numbers if n < max_num_seqs), *[n for n in numbers if n >= max_num_seqs][:1])
