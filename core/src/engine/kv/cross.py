"""Groups that hold the encoder's tokens: they grow with nothing, and are shared whole or not at all.

A request with an encoder input gets all its blocks of these groups when it enters a slot, and keeps them until it
leaves. Its first step fills them, unless all of them are in the prefix cache. There they stand under the sequence's
root, which covers the input, and the block's index. What the decoder computes depends on the encoder, so a cached
prefix counts only beside them. Nobody who listens to cache events is told of them: they hold no tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from engine.kv.hashing import Digest
from engine.kv.index import BlockKey, PrefixIndex
from engine.kv.matching import GroupHit
from engine.kv.pool import PagePool
from engine.kv.tables import BlockTable
from engine.kv.tails import Sequence
from engine.types.errors import InvalidRequestError
from engine.types.kv import NULL_PAGE
from engine.types.request import EncoderInput

_NONE = GroupHit(0, [], np.empty(0, np.int32))


class CrossGroups:
    """The block tables of kind "cross".

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
        self._index, self._pool, self._digest, self._longest = index, pool, digest, max_encoder_len

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
