"""How much of a prompt is cached: one matcher for each kind of cache, and the length that all groups agree on.

full, mla: every block of the prefix must be there. sliding: only those that the last window sees. state: only the
last one, which holds the state that goes on. cross: all blocks of the encoder's input. The longest length that ends a
block in every group and satisfies all groups is taken, as vLLM's hybrid cache coordinator does.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np

from engine.kv.hashing import Digest, MediaSpan
from engine.kv.index import BlockKey, PrefixIndex
from engine.kv.pool import PagePool
from engine.kv.tables import BlockTable
from engine.types.errors import InvalidRequestError
from engine.types.kv import NULL_PAGE
from engine.types.request import EncoderInput


class Sequence(NamedTuple):
    """A request, as the prefix cache reads it.

    Args:
        hashes: of its full hash units, as far as they are needed.
        root: the hash before its first block.
        tokens: int32 [n]; its ids.
        lora_id: of the adapter, for events; `root` covers it.
        media: spans of tokens that stand for media. Partial blocks hold none: equal ids are not equal
            content there.
        encoder: the encoder input; `root` covers it.
    """

    hashes: list[bytes]
    root: bytes
    tokens: np.ndarray
    media: tuple[MediaSpan, ...] = ()
    lora_id: str | None = None
    encoder: EncoderInput | None = None

    def before(self, units: int) -> bytes:
        """The hash that stands after so many hash units."""
        return self.hashes[units - 1] if units else self.root


class RunningTokens(NamedTuple):
    """The ids of all slots, as the scheduler keeps them.

    Args:
        tokens: int32 [num_slots, max_model_len].
        known: int32 [num_slots]; how many of them are valid. The keys and values of the last one may be computed by the
            plan under construction; those before it are there when that plan begins.
    """

    tokens: np.ndarray
    known: np.ndarray


class GroupHit(NamedTuple):
    """What one group takes from the cache.

    Args:
        first_block: the first block taken; those before it have left the window.
        keys: of the blocks taken, in order. Of a "cross" group all that the request has, also where none is taken.
        pages: int32 [n]; their pages, 0 where the block is computed by the very step that is being planned.
    """

    first_block: int
    keys: list[BlockKey]
    pages: np.ndarray


_NONE = GroupHit(0, [], np.empty(0, np.int32))


class PartialBlock(NamedTuple):
    """Tokens of a hit beyond its whole blocks: they lie in pages that go on otherwise, and are copied.

    Args:
        num_tokens: at least 1.
        sources: for each group int32 [n]; the pages that hold these tokens, from the first block after the others.
        cached: the pages are the prefix cache's; False: they belong to a running request.
    """

    num_tokens: int
    sources: tuple[np.ndarray, ...]
    cached: bool


class Hit(NamedTuple):
    """A cached prefix.

    Args:
        num_tokens: its length, the partial block's included.
        groups: each group's whole blocks.
        partial: None where it ends with whole blocks.
        num_missing: of a request that was swapped out: pages that are not cached any more, and have to be loaded.
    """

    num_tokens: int
    groups: tuple[GroupHit, ...]
    partial: PartialBlock | None = None
    num_missing: int = 0

    @property
    def num_whole(self) -> int:
        """Tokens in whole blocks, which are shared, not copied."""
        return self.num_tokens if self.partial is None else self.num_tokens - self.partial.num_tokens

    @property
    def fills_encoder(self) -> bool:
        """Blocks of the encoder's tokens were not found: the request's first step computes them."""
        return any(group.keys and not group.pages.size for group in self.groups)

    def whole_blocks(self) -> Hit:
        """Its whole blocks alone."""
        return Hit(self.num_whole, self.groups)


def match(
    index: PrefixIndex,
    planned: Set[BlockKey],
    tables: tuple[BlockTable, ...],
    hashes: list[bytes],
    *,
    block_size: int,
    unit: int,
    max_tokens: int,
) -> Hit:
    """The longest cached prefix of at most `max_tokens` tokens; its length is 0 where there is none.

    Args:
        index: committed blocks.
        planned: keys of blocks that earlier rows of the plan under construction compute; a step writes all keys and
            values of a layer before it reads any, so they count as cached.
        tables: one a group.
        hashes: of the prompt's full blocks.
        block_size: tokens of the hash unit.
        unit: tokens; lengths are multiples of it.
    """
    limit = min(max_tokens, len(hashes) * block_size) // unit * unit
    found: list[list[int]] = []
    keys: list[list[BlockKey]] = []
    for table in tables:
        of_group = index.keys(
            hashes, table.group.index, 0, limit // table.tokens_per_block, table.tokens_per_block // block_size
        )
        pages = _look_up(index, planned, of_group, stop_at_first_miss=table.window is None)
        if table.window is None:
            limit = min(limit, len(pages) * table.tokens_per_block) // unit * unit
        keys.append(of_group)
        found.append(pages)
        if not limit:
            return no_hit(tables)
    runs = [_runs(pages) if table.window is not None else None for table, pages in zip(tables, found, strict=True)]
    length = limit
    while length and not all(
        run is None or run[(last := length // table.tokens_per_block) - 1] >= last - table.first_needed(length)
        for table, run in zip(tables, runs, strict=True)
    ):
        length -= unit
    if not length:
        return no_hit(tables)
    groups = []
    for table, pages, of_group in zip(tables, found, keys, strict=True):
        first, last = table.first_needed(length), length // table.tokens_per_block
        taken = np.maximum(np.array(pages[first:last], np.int32), 0)
        groups.append(GroupHit(first, of_group[first:last], taken))
    return Hit(length, tuple(groups))


def no_hit(tables: tuple[BlockTable, ...]) -> Hit:
    """Nothing was found."""
    return Hit(0, tuple(GroupHit(0, [], np.empty(0, np.int32)) for _ in tables))


def _look_up(index: PrefixIndex, planned: Set[BlockKey], keys: list[BlockKey], stop_at_first_miss: bool) -> list[int]:
    """For each key its page, 0 where its block is planned, -1 where there is none."""
    page_of = index.page_of
    pages = []
    for key in keys:
        page = page_of(key)
        if page is None:
            if key in planned:
                page = 0
            elif stop_at_first_miss:
                break
            else:
                page = -1
        pages.append(page)
    return pages


def _runs(pages: list[int]) -> list[int]:
    """For each block, how many blocks that end with it are there without a gap."""
    runs, run = [], 0
    for page in pages:
        run = run + 1 if page >= 0 else 0
        runs.append(run)
    return runs


class CrossGroups:
    """The block tables of kind "cross", which hold the encoder's tokens: they grow with nothing, and are shared whole
    or not at all.

    A request with an encoder input gets all its blocks of these groups when it enters a slot, and keeps them until it
    leaves. Its first step fills them, unless all of them are in the prefix cache. There they stand under the sequence's
    root, which covers the input, and the block's index. What the decoder computes depends on the encoder, so a cached
    prefix counts only beside them. Nobody who listens to cache events hears of them: they hold no tokens of a prompt.

    Args:
        tables: one a group; none where the model has no such layers.
        index, pool: the manager's.
        digest: the hash function.
        max_encoder_len: tokens of the longest encoder input.
    """

    def __init__(
        self, tables: tuple[BlockTable, ...], index: PrefixIndex, pool: PagePool, digest: Digest, max_encoder_len: int
    ) -> None:
        self.tables = tables
        self._index = index
        self._pool = pool
        self._digest = digest
        self._longest = max_encoder_len

    def check(self, encoder: EncoderInput | None) -> None:
        """Raise InvalidRequestError where no request of this model can have such an input."""
        if encoder is None:
            return
        asked = f"add a request with an encoder input of {encoder.num_tokens} tokens"
        if not self.tables:
            raise InvalidRequestError(asked, "the model has no layers that read one", "leave it out")
        if not 1 <= encoder.num_tokens <= self._longest:
            raise InvalidRequestError(asked, f"the model reads 1 to {self._longest}", "send a shorter input")

    def pages(self, encoder: EncoderInput | None) -> int:
        """Pages that an input takes in all these groups."""
        return 0 if encoder is None else sum(table.blocks(encoder.num_tokens) for table in self.tables)

    def keys(self, sequence: Sequence, table: BlockTable) -> list[BlockKey]:
        """Of all blocks that a sequence has in one group."""
        if sequence.encoder is None:
            return []
        blocks = range(table.blocks(sequence.encoder.num_tokens))
        hashes = (self._digest(sequence.root + block.to_bytes(4, "little")) for block in blocks)
        return [self._index.key(hashed, table.group.index) for hashed in hashes]

    def find(self, sequence: Sequence, planned: Set[BlockKey], look: bool) -> tuple[bool, tuple[GroupHit, ...]]:
        """Whether all blocks of a sequence are cached, and what each group takes: their pages, or none.

        Args:
            planned: keys of blocks that the plan under construction fills; they count as cached.
            look: False: nothing is looked up.
        """
        if sequence.encoder is None:
            return True, (_NONE,) * len(self.tables)
        keys = [self.keys(sequence, table) for table in self.tables]
        page_of = self._index.page_of
        if look and all(page_of(key) is not None or key in planned for of_group in keys for key in of_group):
            pages = (np.array([page_of(key) or NULL_PAGE for key in of_group], np.int32) for of_group in keys)
            return True, tuple(GroupHit(0, *of_group) for of_group in zip(keys, pages, strict=True))
        return False, tuple(GroupHit(0, of_group, _NONE.pages) for of_group in keys)

    def commit(self, keys: list[BlockKey], pages: np.ndarray) -> None:
        """A plan that is made fills these pages of one group; the index names them where it knows no others."""
        new = self._index.add(keys, pages.tolist())
        named = np.array([NULL_PAGE, *(self._index.page_of(key) for key in keys)], np.int32)
        self._pool.commit(pages[new], named[new])
