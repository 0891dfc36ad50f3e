"""How much of a prompt is cached: one matcher for each kind of cache, and the length that all tables agree on.

full: every block of the prefix must be there. sliding: only those that the last window sees. state: only the last one,
which holds the state that goes on. cross: all blocks of the encoder's input. The longest prefix of whole blocks that
satisfies all tables is taken, as vLLM's hybrid cache coordinator does.
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
        hashes: of its full blocks, as far as they are needed.
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

    def before(self, block: int) -> bytes:
        """The hash that stands before a block."""
        return self.hashes[block - 1] if block else self.root


class RunningTokens(NamedTuple):
    """The ids of all slots, as the scheduler keeps them.

    Args:
        tokens: int32 [num_slots, max_model_len].
        known: int32 [num_slots]; how many of them are valid. The keys and values of the last one may be computed by the
            plan under construction; those before it are there when that plan begins.
    """

    tokens: np.ndarray
    known: np.ndarray


class TableHit(NamedTuple):
    """What one table takes from the cache.

    Args:
        first_block: the first block taken; those before it have left the window.
        keys: of the blocks taken, in order. Of a "cross" table all that the request has, also where none is taken.
        pages: int32 [n]; their pages, 0 where the block is computed by the very step that is being planned.
    """

    first_block: int
    keys: list[BlockKey]
    pages: np.ndarray


_NONE = TableHit(0, [], np.empty(0, np.int32))


class PartialBlock(NamedTuple):
    """Tokens of a hit beyond its whole blocks: they lie in pages that go on otherwise, and are copied.

    Args:
        num_tokens: at least 1.
        sources: int32 [growing tables]; the page of each that holds these tokens.
        cached: the pages are the prefix cache's; False: they belong to a running request.
    """

    num_tokens: int
    sources: np.ndarray
    cached: bool


class Hit(NamedTuple):
    """A cached prefix.

    Args:
        num_tokens: its length, the partial block's included.
        tables: each table's whole blocks.
        partial: None where it ends with whole blocks.
        num_missing: of a request that was swapped out: pages that are not cached any more, and have to be loaded.
    """

    num_tokens: int
    tables: tuple[TableHit, ...]
    partial: PartialBlock | None = None
    num_missing: int = 0

    @property
    def num_whole(self) -> int:
        """Tokens in whole blocks, which are shared, not copied."""
        return self.num_tokens if self.partial is None else self.num_tokens - self.partial.num_tokens

    @property
    def fills_encoder(self) -> bool:
        """Blocks of the encoder's tokens were not found: the request's first step computes them."""
        return any(table.keys and not table.pages.size for table in self.tables)

    def whole_blocks(self) -> Hit:
        """Its whole blocks alone."""
        return Hit(self.num_whole, self.tables)


def match(
    index: PrefixIndex,
    planned: Set[BlockKey],
    tables: tuple[BlockTable, ...],
    hashes: list[bytes],
    *,
    block_size: int,
    max_tokens: int,
) -> Hit:
    """The longest cached prefix of at most `max_tokens` tokens; its length is 0 where there is none.

    Args:
        index: committed blocks.
        planned: keys of blocks that earlier rows of the plan under construction compute; a step writes all keys and
            values of a layer before it reads any, so they count as cached.
        tables: those that grow with a sequence.
        hashes: of the prompt's full blocks.
        block_size: tokens of a block.
    """
    last = min(max_tokens // block_size, len(hashes))
    found: list[list[int]] = []
    for table in tables:
        pages = _look_up(
            index, planned, index.keys(hashes[:last], table.index), stop_at_first_miss=table.window is None
        )
        found.append(pages)
        if table.window is None:
            last = len(pages)
        if not last:
            return no_hit(tables)
    runs = [(table, _runs(pages)) for table, pages in zip(tables, found, strict=True) if table.window is not None]
    while last and not all(run[last - 1] >= last - table.first_needed(last * block_size) for table, run in runs):
        last -= 1
    if not last:
        return no_hit(tables)
    hits = []
    for table, pages in zip(tables, found, strict=True):
        first = table.first_needed(last * block_size)
        taken = np.maximum(np.array(pages[first:last], np.int32), 0)
        hits.append(TableHit(first, index.keys(hashes[first:last], table.index), taken))
    return Hit(last * block_size, tuple(hits))


def no_hit(tables: tuple[BlockTable, ...]) -> Hit:
    """Nothing was found."""
    return Hit(0, (_NONE,) * len(tables))


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


class CrossTables:
    """The block tables of kind "cross", which hold the encoder's tokens: they grow with nothing, and are shared whole
    or not at all.

    A request with an encoder input gets all its blocks of these tables when it enters a slot, and keeps them until it
    leaves. Its first step fills them, unless all of them are in the prefix cache. There they stand under the sequence's
    root, which covers the input, and the block's index. What the decoder computes depends on the encoder, so a cached
    prefix counts only beside them. Nobody who listens to cache events hears of them: they hold no tokens of a prompt.

    Args:
        tables: none where the model has no such layers.
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
        """Pages that an input takes in all these tables."""
        return 0 if encoder is None else sum(table.blocks(encoder.num_tokens) for table in self.tables)

    def keys(self, sequence: Sequence, table: BlockTable) -> list[BlockKey]:
        """Of all blocks that a sequence has in one table."""
        if sequence.encoder is None:
            return []
        blocks = range(table.blocks(sequence.encoder.num_tokens))
        hashes = (self._digest(sequence.root + block.to_bytes(4, "little")) for block in blocks)
        return [self._index.key(hashed, table.index) for hashed in hashes]

    def find(self, sequence: Sequence, planned: Set[BlockKey], look: bool) -> tuple[bool, tuple[TableHit, ...]]:
        """Whether all blocks of a sequence are cached, and what each table takes: their pages, or none.

        Args:
            planned: keys of blocks that the plan under construction fills; they count as cached.
            look: False: nothing is looked up.
        """
        if sequence.encoder is None:
            return True, (_NONE,) * len(self.tables)
        keys = [self.keys(sequence, table) for table in self.tables]
        page_of = self._index.page_of
        if look and all(page_of(key) is not None or key in planned for of_table in keys for key in of_table):
            pages = (np.array([page_of(key) or NULL_PAGE for key in of_table], np.int32) for of_table in keys)
            return True, tuple(TableHit(0, *of_table) for of_table in zip(keys, pages, strict=True))
        return False, tuple(TableHit(0, of_table, _NONE.pages) for of_table in keys)

    def commit(self, keys: list[BlockKey], pages: np.ndarray) -> None:
        """A plan that is made fills these pages of one table; the index names them where it knows no others."""
        new = self._index.add(keys, pages.tolist())
        named = np.array([NULL_PAGE, *(self._index.page_of(key) for key in keys)], np.int32)
        self._pool.commit(pages[new], named[new])
