"""The numbers of rows for which a decode step is captured, and of tokens for which one with prompts is."""

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


MIXED_TOKENS = 64
"""What a step with prompts in it is padded up to a multiple of, up to 512 tokens, then of two. So many more cost what
the weights' reading hides while a step has some 200 tokens, and at most a seventh of it above."""
MOST_MIXED, FEWEST_MIXED = 1024, 128
LAYER_SECONDS = 12 * 11e-6
"""What the host takes to launch a layer with prompts in it: 12 launches of 11 us."""
FLOPS = 600e12
"""A second, of a GPU of 2023 and later, in bfloat16. A smaller one wants captured steps for fewer tokens."""


def hidden_tokens(hidden_size: int, ranks: int) -> int:
    """Of a step of which a layer takes the GPU as long as launching it takes the host: with more it waits for nobody,
    and padding is all that a captured step would add. A layer has 12 * hidden_size ** 2 weights, more or less."""
    return int(LAYER_SECONDS * FLOPS * ranks / (2 * 12 * hidden_size**2))


def token_buckets(most: int, asked: Sequence[int] | None = None, useful: int = MOST_MIXED) -> tuple[int, ...]:
    """Tokens of steps with prompts in them, ascending: each is captured once, and larger steps run as they are.

    Args:
        most: of a step.
        asked: these, instead of every 64th up to 512 and every 128th up to 1,024.
        useful: see `hidden_tokens`; of more than these, and of more than 128, none is captured that is not asked for.
    """
    if asked is None:
        useful = max(FEWEST_MIXED, min(MOST_MIXED, useful))
        usual = (*range(MIXED_TOKENS, MOST_TOKENS, MIXED_TOKENS), *range(MOST_TOKENS, MOST_MIXED + 1, 2 * MIXED_TOKENS))
        asked = [tokens for tokens in (*usual, most) if tokens <= useful]
    return tuple(sorted({tokens for tokens in asked if 2 <= tokens <= most}))
