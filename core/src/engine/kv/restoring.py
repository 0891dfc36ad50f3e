"""A slot's pages on their way out of the pool and back: which blocks are taken out, and which must be brought in again.

A request that was swapped out finds part of its blocks in the prefix cache when it comes back; only the others, and its
last block where that is not full, are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.kv.hashing import extend_hashes
from engine.kv.manager import KVManager, NewEntries
from engine.kv.matching import GroupHit, Hit
from engine.kv.tails import Sequence
from engine.types.kv import NULL_PAGE


@dataclass(frozen=True, slots=True)
class Outline:
    """What a slot held when it was taken out.

    Args:
        num_tokens: whose keys and values are in its pages.
        first_block: of each group that grows with the sequence.
        commits: its blocks may enter the prefix cache, and be found there.
        num_resets: of the cache, until then; content from before a reset is neither offered nor looked for.
    """

    num_tokens: int
    first_block: tuple[int, ...]
    commits: bool
    num_resets: int


@dataclass(slots=True)
class Restored:
    """A request on its way back, in the step that is being planned.

    Args:
        outline: what was taken out.
        commits: its blocks may enter the prefix cache again.
        hit: all its full blocks; NULL_PAGE stands for those to be loaded.
        missing: for each group how many these are.
    """

    outline: Outline
    commits: bool
    hit: Hit
    missing: list[int]


def take_out(kv: KVManager, slot: int, num_tokens: int) -> tuple[Outline, np.ndarray]:
    """The outline of a slot, and the pages that hold it, group after group, in order.

    num_tokens: computed by plans that are made; those after it are not wanted.
    """
    first_block, pages = [], []
    for table in kv.growing:
        first = max(int(table.first_block[slot]), table.first_needed(num_tokens))
        first_block.append(first)
        pages.append(table.pages[slot, first : table.blocks(num_tokens)])
    pages += [table.live(slot) for table in kv.cross.tables]
    outline = Outline(num_tokens, tuple(first_block), kv.commits.wants(slot), kv.num_resets)
    return outline, np.concatenate(pages)


def find(kv: KVManager, outline: Outline, sequence: Sequence) -> Restored:
    """Look which blocks the prefix cache still has.

    sequence: all that is known of the request; its hashes are extended in place where more are needed.
    """
    hashes, root, tokens, media, _, _ = sequence
    commits = outline.commits and outline.num_resets == kv.num_resets
    if commits:
        extend_hashes(hashes, root, tokens, kv.block_size, digest=kv.digest, media=media)
    groups, missing = [], []
    for group, (table, first) in enumerate(zip(kv.growing, outline.first_block, strict=True)):
        full = outline.num_tokens // table.tokens_per_block
        pages = np.full(max(0, full - first), NULL_PAGE, np.int32)
        if commits:
            keys = kv.index.keys(hashes, group, first, full, table.tokens_per_block // kv.block_size)
            pages[:] = [kv.index.page_of(key) or NULL_PAGE for key in keys]
        groups.append(GroupHit(first, [], pages))
        missing.append(int(np.count_nonzero(pages == NULL_PAGE)))
    if kv.cross.tables:
        found, of_encoder = kv.cross.find(sequence, frozenset(), look=commits)
        for cross in of_encoder:
            pages = cross.pages if found else np.full(len(cross.keys), NULL_PAGE, np.int32)
            groups.append(GroupHit(0, [], pages))
            missing.append(0 if found else pages.size)
    return Restored(outline, commits, Hit(outline.num_tokens, tuple(groups)), missing)


def begin(kv: KVManager, slot: int, restored: Restored) -> None:
    """The request enters an empty slot: hold what was found. The pages of what is missing were promised before."""
    kv.begin_slot(slot, restored.hit)
    if restored.commits:
        kv.commits.begin(slot, 0)  # from the start: blocks that were given up meanwhile enter the cache again
    else:
        kv.commits.end(slot)


def open_slot(
    kv: KVManager, slot: int, restored: Restored, sequence: Sequence
) -> tuple[list[NewEntries], list[np.ndarray]]:
    """Fill the slot's tables up to its last full block, with promised pages where they are missing.

    Returns:
        The entries, and for each group the pages that wait to be loaded, NULL_PAGE standing for those that do not.
    """
    kv.tails.limits[slot] = 0
    if restored.commits and not sequence.media:  # others may copy from its last block
        kv.tails.tips[slot] = sequence.before(restored.outline.num_tokens // kv.unit * kv.unit // kv.block_size)
    entries, to_load = [], []
    for group, (table, found) in enumerate(zip(kv.tables, restored.hit.groups, strict=True)):
        pages, empty = found.pages.copy(), found.pages == NULL_PAGE
        pages[empty] = kv.take_next(group, restored.missing[group])
        table.num_blocks[slot] = table.first_block[slot] = found.first_block
        first = table.append(slot, pages)
        index = np.arange(first, first + pages.size, dtype=np.int32)
        entries.append(NewEntries(np.full(pages.size, slot, np.int32), index, pages))
        to_load.append(np.where(empty, pages, NULL_PAGE))
        if restored.commits and table.group.kind == "cross":
            kv.cross.commit(kv.cross.keys(sequence, table), pages)
    return entries, to_load


def copies_in(kv: KVManager, slot: int, restored: Restored, to_load: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(places int32 [m], pages int32 [m]): the places[i]-th page that `take_out` gave goes to pages[i].

    Called when the slot has its pages for the step, the one of a block that was not full among them.
    """
    targets = []
    for table, of_group in zip(kv.tables, to_load, strict=True):
        full, blocks = (
            restored.outline.num_tokens // table.tokens_per_block,
            table.blocks(restored.outline.num_tokens),
        )
        targets.append(of_group)
        if table.group.kind != "cross":
            targets.append(table.pages[slot, full:blocks])
    pages = np.concatenate(targets)
    places = np.flatnonzero(pages != NULL_PAGE).astype(np.int32)
    return places, pages[places]
