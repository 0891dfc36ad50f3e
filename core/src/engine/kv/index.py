"""The one hash index: which page holds which block of which group, and which blocks follow a prefix."""

from __future__ import annotations

import numpy as np

from engine.kv.branches import Branches
from engine.kv.events import KVEventLog

BlockKey = bytes
"""A block's hash and, after it, its KV group."""


class PrefixIndex:
    """Block keys to pages and back. A page stands under one key at most, and a key names one page at most."""

    def __init__(self, num_pages: int, num_groups: int) -> None:
        self._pages: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_pages
        self._suffixes = [b"" if group == 0 else group.to_bytes(2, "little") for group in range(num_groups)]
        self.page_of = self._pages.get
        self.branches = Branches(num_pages)
        self.events: KVEventLog | None = None

    def key(self, hashed: bytes, group: int) -> BlockKey:
        """The key of the block of a group that ends where this hash does."""
        return hashed + self._suffixes[group]

    def __len__(self) -> int:
        return len(self._pages)

    def keys(self, hashes: list[bytes], group: int, start: int, end: int, hashes_per_block: int) -> list[BlockKey]:
        """The keys of blocks start .. end - 1 of a group, each `hashes_per_block` hash units long."""
        suffix, step = self._suffixes[group], hashes_per_block
        if not suffix and step == 1:
            return hashes[start:end]
        return [hashed + suffix for hashed in hashes[(start + 1) * step - 1 : end * step : step]]

    def add(self, key: BlockKey, page: int) -> bool:
        """`page`, which stands under no other key, holds the block of `key`. False where this is known of it, or of
        another page."""
        if self._pages.setdefault(key, page) != page:
            return False
        if (known := self._keys[page]) is not None:
            assert known == key
            return False
        self._keys[page] = key
        return True

    def forget(self, pages: np.ndarray) -> None:
        """These pages will be overwritten."""
        if self.events is not None:
            self.events.removed(pages)
        for page in pages.tolist():
            key = self._keys[page]
            assert key is not None
            del self._pages[key]
            self._keys[page] = None
            self.branches.forget(page)

    def clear(self) -> None:
        """Forget everything."""
        if self.events is not None:
            self.events.cleared()
        self._pages.clear()
        self._keys = [None] * len(self._keys)
        self.branches.clear()

    def check_integrity(self, committed: np.ndarray) -> None:
        """Raise AssertionError unless keys and pages agree with each other and with `committed`, bool [num_pages]."""
        assert all(self._keys[page] == key for key, page in self._pages.items()), "index and pages disagree"
        held = {page for page, key in enumerate(self._keys) if key is not None}
        assert len(held) == len(self._pages), "a page stands under a key that the index does not know"
        assert held == set(np.flatnonzero(committed).tolist()), "committed pages are not those of the index"
        self.branches.check_integrity(committed)
