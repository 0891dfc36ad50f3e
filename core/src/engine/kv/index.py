"""The one hash index: which page holds which block of which group, and which blocks follow a prefix."""

from __future__ import annotations

from typing import cast

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

    def suffix(self, group: int) -> bytes:
        """What stands behind a hash in the key of a group's block."""
        return self._suffixes[group]

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
        self.branches.forget(gone)

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
