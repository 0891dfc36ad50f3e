"""Point `evictor`: the order in which cached pages are given up. Matching and counting are the KV manager's.

Minor version 1 added `hashes` to `Evictor.on_commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.plugin import Card

if TYPE_CHECKING:
    import numpy as np

    from engine.interfaces.context import CoreContext


class EvictorCard(Card):
    """Describes an evictor. Needs nothing of the device: `unsupported` gets None."""


class Evictor(Protocol):
    """Keeps the order of pages whose content is cached and that nobody holds.

    Pages are int32 numpy arrays. Each method is called at most once a step and KV table. A page that a request
    holds, or that an unfinished step names, is never a candidate: it was not released, or was touched since.
    """

    def __init__(self, context: CoreContext) -> None: ...

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        """These pages now hold cached content.

        Args:
            pages, parents: int32 [m]; parents[i] is the page before pages[i] in its sequence, 0 for none.
            hashes: m of them; hashes[i] names what pages[i] holds: the keys and values of one KV table for these
                tokens after those before them. No two cached pages have the same. What was given up and is computed
                again has the hash that it had, on whichever page: so an evictor can tell what comes back from what is
                new (the ghost lists of 2Q and ARC). One that keeps hashes of pages that it gave up keeps a bounded
                number of them.

        A page that was committed before and is no candidate may be committed anew: what it held was not to be trusted,
        and its holders gave it back without a release that is told here.
        """
        ...

    def on_touch(self, pages: np.ndarray) -> None:
        """A request found these committed pages and holds them: no candidates (any more) until they are released."""
        ...

    def on_release(self, pages: np.ndarray) -> None:
        """Nobody holds these committed pages any more: they are candidates, the last in the array to go first."""
        ...

    def victims(self, n: int, table: int) -> np.ndarray:
        """Up to n candidates to give up, first the one to go first. They are forgotten by this call.

        table: the KV table that wants pages (any table's candidates may be given).
        """
        ...

    def __len__(self) -> int:
        """The number of candidates."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError where the inner state contradicts itself. For tests and idle moments."""
        ...
