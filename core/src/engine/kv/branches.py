"""What follows a prefix: for each prefix that ends a block in every group, the cached blocks after it.

The prefix index finds whole blocks. Here a request finds the block that shares the most tokens with it, so that the
page can be copied and filled on from there: prefix hits to the token, as SGLang's radix tree gives them. The blocks
after one prefix are kept in the order of their tokens, so the longest common beginning is that of a neighbour.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

_NEIGHBOURS = 4
"""How far to look on each side for a branch whose pages are all there: groups lose theirs one by one."""


Branch = tuple[bytes, tuple[bytes, ...], bytes, int]
"""Cached tokens after a prefix: a whole unit, or the partly filled last one of a sequence that has ended. In order:

tokens: little-endian int32, as bytes.
hashes: of the hash units that the tokens fill and, where some are left over, of these.
parent: the hash that stands before them.
page: the last page of the first group; the branch is forgotten with it.

A plain tuple: one is made for each block that is committed.
"""


class Branches:
    """All branches, by the hash of the prefix that they follow.

    Args:
        num_pages: of the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self._after: dict[bytes, list[Branch]] = {}
        self._of_page: list[Branch | None] = [None] * num_pages

    def add(self, branch: Branch) -> None:
        """Remember a branch, unless its page has one already: that is the same one."""
        _, _, parent, page = branch
        if self._of_page[page] is not None:
            return
        self._of_page[page] = branch
        others = self._after.get(parent)
        if others is None:
            self._after[parent] = [branch]
        else:
            insort(others, branch)

    def forget(self, pages: list[int]) -> None:
        """These pages will be overwritten."""
        of_page, after = self._of_page, self._after
        for page in pages:
            branch = of_page[page]
            if branch is None:
                continue
            of_page[page] = None
            parent = branch[2]
            others = after[parent]
            if len(others) == 1:
                del after[parent]
            else:
                del others[bisect_left(others, branch)]

    def clear(self) -> None:
        """Forget everything."""
        self._after.clear()
        self._of_page = [None] * len(self._of_page)

    def nearest(self, parent: bytes, tokens: bytes) -> Iterator[tuple[int, Branch]]:
        """(tokens in common, branch) of branches after `parent` that share some with `tokens`, the most first."""
        others = self._after.get(parent)
        if not others:
            return
        place = bisect_left(others, (tokens,))
        near = others[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]
        found = [(common_tokens(branch[0], tokens), branch) for branch in near]
        yield from sorted((entry for entry in found if entry[0]), key=lambda entry: -entry[0])

    def beginnings(self, parent: bytes, tokens: bytes) -> list[Branch]:
        """The branches after `parent` with which `tokens` begin."""
        return [branch for branch in self._after.get(parent, ()) if tokens.startswith(branch[0])]

    def check_integrity(self, committed: np.ndarray) -> None:
        """Raise AssertionError where branches and pages disagree. committed: bool [num_pages]."""
        pages = [branch[3] for others in self._after.values() for branch in others]
        assert sorted(pages) == [page for page, branch in enumerate(self._of_page) if branch is not None]
        assert committed[pages].all(), "a branch outlives its page"
        for parent, others in self._after.items():
            assert others and others == sorted(others) and all(branch[2] == parent for branch in others)


def common_tokens(a: bytes, b: bytes) -> int:
    """How many int32 the two have in common at their beginning."""
    n = min(len(a), len(b))
    differ = np.frombuffer(a[:n], np.int32) != np.frombuffer(b[:n], np.int32)
    return int(differ.argmax()) if differ.any() else n // 4
