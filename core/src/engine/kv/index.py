"""The one hash index: which page holds which block of which table, which blocks follow a prefix, and what changed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from engine.types.kv import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_NEIGHBOURS = 4
"""How far to look on each side for a child whose pages are all there: tables lose theirs one by one."""

BlockKey = bytes
"""A block's hash and, after it, its KV table."""


def table_suffix(table: int) -> bytes:
    """What stands behind the hash in a key."""
    return table.to_bytes(2, "little") if table else b""


class PrefixIndex:
    """Block keys to pages and back. A page stands under one key at most, and a key names one page at most.

    Attributes:
        retention: what requests retain (`engine_kit.kv_retention`); None: nothing, for the reason in `retains_not`.
    """

    def __init__(self, num_pages: int, num_tables: int) -> None:
        self._pages: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_pages
        self._suffixes = [table_suffix(table) for table in range(num_tables)]
        self.page_of = self._pages.get
        self.children = RadixChildren(num_pages)
        self.events: KVEventLog | None = None
        self.retention: Any = None
        self.retains_not = "it has no engine-kit"

    def key(self, hashed: bytes, table: int) -> BlockKey:
        """The key of the block of a table that ends where this hash does."""
        return hashed + self._suffixes[table]

    def __len__(self) -> int:
        return len(self._pages)

    def keys(self, hashes: list[bytes], table: int) -> list[BlockKey]:
        """The keys of the blocks of a table that end where these hashes do."""
        suffix = self._suffixes[table]
        return [hashed + suffix for hashed in hashes] if suffix else hashes

    def keys_of(self, pages: np.ndarray) -> list[BlockKey]:
        """The keys under which these pages stand."""
        names = self._keys
        keys = [names[page] for page in pages.tolist()]
        assert None not in keys
        return cast("list[BlockKey]", keys)

    def add(self, keys: list[BlockKey], pages: list[int]) -> list[int]:
        """Each of these pages, which stand under no other key, holds the block of its key. Returns the places of those
        of which this was not known yet, and of no other page."""
        name, names, new = self._pages.setdefault, self._keys, []
        for place, (key, page) in enumerate(zip(keys, pages, strict=True)):
            if name(key, page) != page:
                continue
            if (known := names[page]) is None:
                names[page] = key
                new.append(place)
            else:
                assert known == key
        return new

    def forget(self, pages: np.ndarray) -> None:
        """These pages will be overwritten."""
        if self.events is not None:
            self.events.removed(pages)
        named, keys = self._pages, self._keys
        gone = pages.tolist()
        for page in gone:
            key = keys[page]
            assert key is not None
            del named[key]
            keys[page] = None
        self.children.forget(gone)
        if self.retention is not None:
            self.retention.lost(pages)

    def retained(self) -> np.ndarray:
        """bool [num_pages]: which pages requests retain."""
        return np.zeros(len(self._keys), bool) if self.retention is None else self.retention.of_pages()

    def clear(self) -> None:
        """Forget everything."""
        if self.events is not None:
            self.events.cleared()
        self._pages.clear()
        self._keys = [None] * len(self._keys)
        self.children.clear()
        if self.retention is not None:
            self.retention.clear()

    def check_integrity(self, committed: np.ndarray) -> None:
        """Raise AssertionError unless keys and pages agree with each other and with `committed`, bool [num_pages]."""
        assert all(self._keys[page] == key for key, page in self._pages.items()), "index and pages disagree"
        held = {page for page, key in enumerate(self._keys) if key is not None}
        assert len(held) == len(self._pages), "a page stands under a key that the index does not know"
        assert held == set(np.flatnonzero(committed).tolist()), "committed pages are not those of the index"
        self.children.check_integrity(committed)
        if self.retention is not None:
            self.retention.check_integrity(committed)


RadixChild = tuple[bytes, bytes, bytes, int]
"""Cached tokens after a prefix: a whole block, or the partly filled last one of a sequence that has ended. In order:

tokens: little-endian int32, as bytes. So children are kept in the order of their tokens.
hash: of the block.
parent: the hash that stands before it.
page: of the first table; the child is forgotten with it.

A plain tuple: one is made for each block that is cached, and the garbage collector does not follow it. As a NamedTuple
or a class with slots it costs 3 % of a step of 256 decodes.
"""


class RadixChildren:
    """What follows a prefix: for each prefix of whole blocks, the cached blocks after it.

    The prefix index finds whole blocks. Here a request finds the block that shares the most tokens with it, so that the
    page can be copied and filled on from there: prefix hits to the token, as SGLang's radix tree gives them. The blocks
    after one prefix are kept in the order of their tokens, so the longest common beginning is that of a neighbour.

    Args:
        num_pages: of the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self._after: dict[bytes, list[RadixChild]] = {}
        self._of_page: list[RadixChild | None] = [None] * num_pages

    def add(self, child: RadixChild) -> None:
        """Remember a child, unless its page has one already: that is the same one."""
        _, _, parent, page = child
        if self._of_page[page] is not None:
            return
        self._of_page[page] = child
        others = self._after.get(parent)
        if others is None:
            self._after[parent] = [child]
        else:
            insort(others, child)

    def forget(self, pages: list[int]) -> None:
        """These pages will be overwritten."""
        of_page, after = self._of_page, self._after
        for page in pages:
            child = of_page[page]
            if child is None:
                continue
            of_page[page] = None
            parent = child[2]
            others = after[parent]
            if len(others) == 1:
                del after[parent]
            else:
                del others[bisect_left(others, child)]

    def clear(self) -> None:
        """Forget everything."""
        self._after.clear()
        self._of_page = [None] * len(self._of_page)

    def nearest(self, parent: bytes, tokens: bytes) -> Iterator[tuple[int, RadixChild]]:
        """(tokens in common, child) of the children of `parent` that share some with `tokens`, the most first."""
        others = self._after.get(parent)
        if not others:
            return
        place = bisect_left(others, (tokens,))
        near = others[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]
        found = [(common_tokens(child[0], tokens), child) for child in near]
        yield from sorted((entry for entry in found if entry[0]), key=lambda entry: -entry[0])

    def below(self, hashes: Iterable[bytes]) -> set[bytes]:
        """The hashes of all children that follow these, at any distance."""
        found, left = set[bytes](), list(hashes)
        while left:
            fresh = {hashed for _, hashed, _, _ in self._after.get(left.pop(), ())} - found
            found |= fresh
            left.extend(fresh)
        return found

    def beginnings(self, parent: bytes, tokens: bytes) -> list[RadixChild]:
        """The children of `parent` with which `tokens` begin."""
        return [child for child in self._after.get(parent, ()) if tokens.startswith(child[0])]

    def check_integrity(self, committed: np.ndarray) -> None:
        """Raise AssertionError where children and pages disagree. committed: bool [num_pages]."""
        pages = [child[3] for others in self._after.values() for child in others]
        assert sorted(pages) == [page for page, child in enumerate(self._of_page) if child is not None]
        assert committed[pages].all(), "a child outlives its page"
        for parent, others in self._after.items():
            assert others and others == sorted(others) and all(child[2] == parent for child in others)


def common_tokens(a: bytes, b: bytes) -> int:
    """How many int32 the two have in common at their beginning."""
    n = min(len(a), len(b))
    differ = np.frombuffer(a[:n], np.int32) != np.frombuffer(b[:n], np.int32)
    return int(differ.argmax()) if differ.any() else n // 4


class KVEventLog:
    """What happened to the prefix cache since the events were last taken, where somebody listens.

    Args:
        num_pages: of the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self._events: list[KVEvent] = []
        self._removed: dict[int, list[bytes]] = {}
        self._stored: list[tuple[int, bytes] | None] = [None] * num_pages  # (table, hash) of each page

    def stored(
        self,
        table: int,
        blocks: Sequence[tuple[int, bytes]],
        parent: bytes | None,
        tokens: np.ndarray,
        block_size: int,
        lora_id: str | None,
    ) -> None:
        """Blocks, (page, hash) each, were committed one after another; tokens: int32 [len(blocks) * block_size]."""
        self._flush_removed()
        for page, hashed in blocks:
            self._stored[page] = (table, hashed)
        self._events.append(
            BlockStored(
                block_hashes=[hashed for _, hashed in blocks],
                parent_block_hash=parent,
                token_ids=tokens.tolist(),
                block_size=block_size,
                table=table,
                lora_id=lora_id,
            )
        )

    def removed(self, pages: np.ndarray) -> None:
        """The content of these pages was given up."""
        for page in pages.tolist():
            block = self._stored[page]
            if block is not None:
                self._stored[page] = None
                self._removed.setdefault(block[0], []).append(block[1])

    def cleared(self) -> None:
        """Everything was."""
        self._flush_removed()
        self._stored = [None] * len(self._stored)
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        removed, self._removed = self._removed, {}
        self._events += [BlockRemoved(block_hashes=hashes, table=table) for table, hashes in removed.items()]
