"""The numbers of rows for which a decode step is captured."""

from __future__ import annotations

from collections.abc import Sequence

_FIRST = (1, 2, 4)
_FINE, _COARSE = 256, 512
"""Up to these, every 8th and every 16th number: a step is padded by 3 % at most where it has more than 256 rows."""


def row_buckets(max_num_seqs: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ascending; the last one that a step of `max_num_seqs` rows fits into is the only one as large.

    Above 512 rows none is captured unless it is asked for: a step takes so long then that launching it is the least.

    asked: instead of the usual ones.
    """
    if asked is None:
        usual = (*_FIRST, *range(8, _FINE, 8), *range(_FINE, _COARSE + 1, 16))
        asked = (*usual, max_num_seqs) if max_num_seqs <= _COARSE else usual
    numbers = sorted(set(asked))
    return (*(n for n in numbers if n < max_num_seqs), *[n for n in numbers if n >= max_num_seqs][:1])
