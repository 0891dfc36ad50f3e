"""How a step is divided into launches. Nothing is prepared on the device: programs find their work in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.interfaces.attention import AttentionBatch
from engine_cuda.attention_mla.tiles import LatentTiles, Target, tiles_of

MOST_SPLITS = 64
"""Programs that share a row, at most: one joins them."""
LEAST_SPLIT = 128
"""Vectors of a split, at least: fewer are not worth the joining."""


class Launch(NamedTuple):
    """One launch of the kernel: some rows of the step.

    Args:
        first_row: the first one; the last is the step's, or the last decode.
        num_rows: where they end.
        blocks: tiles of queries, or a few more.
        splits: programs that share a tile's vectors.
        ragged: rows have any number of tokens; else one each, and row r is token r.
        tiles: the form.
    """

    first_row: int
    num_rows: int
    blocks: int
    splits: int
    ragged: bool
    tiles: LatentTiles


@dataclass(slots=True)
class MLAPlan:
    """What `TritonLatentAttentionBody.plan` makes. A refilled one keeps its launches: they follow from R and T alone,
    where every row has the same number of tokens.

    Args:
        batch: the step's; its tensors are read by the kernels.
        launches: decodes, and the other rows.
        num_tokens: of real rows; the tokens after it are padding.
    """

    batch: AttentionBatch
    launches: tuple[Launch, ...]
    num_tokens: int


def launches_of(
    batch: AttentionBatch, heads: int, dtype_bytes: int, kv_bytes: int, target: Target, processors: int
) -> tuple[Launch, ...]:
    """Of one step.

    Args:
        heads: on this rank.
        processors: multiprocessors.
    """
    rows, decodes = batch.num_rows, batch.num_decodes
    # Of rows that are not decodes, tokens behind the last row included: a captured step knows no exact number.
    tokens = batch.num_tokens - decodes
    found = []
    if decodes:
        tiles = tiles_of(heads, dtype_bytes, kv_bytes, target)
        blocks = decodes * -(-heads // tiles.queries)
        found.append(Launch(0, decodes, blocks, splits_of(blocks, tiles, processors), False, tiles))
    if rows > decodes:
        tiles = tiles_of(-(-tokens // (rows - decodes)) * heads, dtype_bytes, kv_bytes, target)
        blocks = tokens * heads // tiles.queries + rows - decodes
        found.append(Launch(decodes, rows, blocks, splits_of(blocks, tiles, processors), True, tiles))
    return tuple(found)


def splits_of(blocks: int, tiles: LatentTiles, processors: int) -> int:
    """As many as fill the GPU; lengths have no say, so that a captured step is right, and fast, for longer rows."""
    return max(1, min(MOST_SPLITS, tiles.per_processor * processors // blocks))
