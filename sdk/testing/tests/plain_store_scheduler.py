"""The scheduler half of the plain store. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from engine.interfaces.kv_connector import Found, KVConnectorScheduler, Pages, Transferable, Transferred

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext


class Moves(msgspec.Struct, kw_only=True):
    """Of one step: (key, page) to save, to fill, to fill by and by for a request; requests that are over."""

    save: list[tuple[bytes, int]] = []
    fill: list[tuple[bytes, int]] = []
    travel: dict[str, list[tuple[bytes, int]]] = {}
    drop: list[str] = []


class News(msgspec.Struct, kw_only=True):
    """Of one rank."""

    rank: int
    loaded: list[str] = []
    failed: list[int] = []


class PlainStoreScheduler(KVConnectorScheduler):
    """See there: knows what has been saved."""

    asynchronous: ClassVar[bool] = False
    saved: ClassVar[set[bytes]] = set()

    def __init__(self, context: CoreContext) -> None:
        self.identity = context.identity
        self.block_size = context.layout.block_size
        self.world = context.parallel.world
        self.moves = Moves()
        self.travel: dict[str, int] = {}

    def keys(self, request: Transferable) -> list[bytes]:
        """Under which its blocks are saved."""
        return [self.identity + key for key in request.block_keys(0)]

    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        """The blocks that are there."""
        first = block = num_local // self.block_size
        keys = self.keys(request)[: request.num_loadable // self.block_size]
        while block < len(keys) and keys[block] in self.saved:
            block += 1
        return Found((block - first) * self.block_size, self.asynchronous) if block > first else None

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        """Fill them."""
        moves = self._moves(request, pages)
        if self.asynchronous:
            self.moves.travel[request.request_id] = moves
            self.travel[request.request_id] = self.world
        else:
            self.moves.fill += moves

    def computed(self, request: Transferable, pages: Sequence[Pages], end: int) -> None:
        """Save them."""
        self.moves.save += (moves := self._moves(request, pages))
        self.saved.update(key for key, _ in moves)

    def _moves(self, request: Transferable, pages: Sequence[Pages]) -> list[tuple[bytes, int]]:
        ((_, first, of_table),) = pages
        return list(zip(self.keys(request)[first:], of_table.tolist(), strict=False))

    def aborted(self, request_id: str) -> None:
        """A load under way ends."""
        if request_id in self.travel:
            self.moves.drop.append(request_id)
            if (moves := self.moves.travel.get(request_id)) is not None:
                moves.clear()  # nothing has begun: the next section begins and ends it

    def plan_section(self) -> bytes | None:
        """What is to be moved."""
        moves, self.moves = self.moves, Moves()
        return None if moves == Moves() else msgspec.msgpack.encode(moves)

    def take(self, news: Sequence[bytes]) -> Transferred:
        """A load has ended when every rank says so."""
        loaded: list[str] = []
        failed: list[int] = []
        for told in (msgspec.msgpack.decode(one, type=News) for one in news):
            failed += told.failed
            for request_id in told.loaded:
                self.travel[request_id] -= 1
                if not self.travel[request_id]:
                    del self.travel[request_id]
                    loaded.append(request_id)
        return Transferred(loaded, (), np.unique(np.array(failed, np.int32)))


class Travelling(PlainStoreScheduler):
    """Loads take their time."""

    asynchronous = True
