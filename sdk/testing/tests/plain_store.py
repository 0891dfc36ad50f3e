"""The worker half of the plain store: a dictionary of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import torch
from plain_store_scheduler import Moves, News

from engine.interfaces.kv_connector import KVConnectorWorker

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class PlainStore(KVConnectorWorker):
    """See there. Loads of a request that travel take two steps, and one more on each rank."""

    shelf: ClassVar[dict[tuple[int, bytes], torch.Tensor]] = {}

    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.start.place.rank
        (group,) = context.start.layout.groups
        self.parts = [slice(i * group.layer_bytes, (i + 1) * group.layer_bytes) for i in group.sites]
        self.moves = Moves()
        self.travel: dict[str, list[tuple[bytes, int]]] = {}
        self.waits: dict[str, int] = {}
        self.told = News(rank=self.rank)

    def register(self, pool: Any) -> None:
        """The pool."""
        self.pool = pool

    def lose(self) -> None:
        """All that is kept."""
        self.shelf.clear()

    def begin(self, step_id: int, section: bytes | None) -> None:
        """Pages out."""
        self.moves = Moves() if section is None else msgspec.msgpack.decode(section, type=Moves)
        for key, page in self.moves.save:
            self.shelf[self.rank, key] = self.keep(page)
        for request_id in self.moves.drop:
            self.drop(request_id)

    def keep(self, page: int) -> torch.Tensor:
        """What a page holds."""
        return self.pool[page].clone()

    def drop(self, request_id: str) -> None:
        """Its load ends here."""
        if self.travel.pop(request_id, None) is not None:
            self.told.loaded.append(request_id)

    def load(self, step_id: int) -> None:
        """Pages in."""
        for request_id, moves in list(self.travel.items()):
            self.waits[request_id] -= 1
            if not self.waits[request_id]:
                for key, page in moves:
                    self.fill(key, page)
                self.drop(request_id)
        self.travel.update(self.moves.travel)
        self.waits.update(dict.fromkeys(self.moves.travel, 1 + self.rank))
        for key, page in self.moves.fill:
            self.fill(key, page)

    def fill(self, key: bytes, page: int) -> None:
        """One page."""
        if (self.rank, key) in self.shelf:
            self.write(page, self.shelf[self.rank, key])
        else:
            self.told.failed.append(page)

    def write(self, page: int, kept: Any) -> None:
        """What was kept."""
        self.pool[page] = kept

    def news(self) -> bytes | None:
        """What has ended, what has failed."""
        told, self.told = self.told, News(rank=self.rank)
        return msgspec.msgpack.encode(told) if told.loaded or told.failed else None


class ByLayers(PlainStore):
    """Each layer's part when its turn comes."""

    def load(self, step_id: int) -> None:
        """Nothing yet."""

    def before_layer(self, site: int) -> None:
        """This layer's part."""
        for key, page in self.moves.fill:
            if (self.rank, key) in self.shelf:
                self.pool[page, self.parts[site]] = self.shelf[self.rank, key][self.parts[site]]
            elif not site:
                self.told.failed.append(page)


class PagedStore(PlainStore):
    """The same of a pool that is no tensor."""

    def keep(self, page: int) -> Any:
        """What a page holds, when it is asked."""
        return self.pool.read(np.array([page], np.int32))

    def write(self, page: int, kept: Any) -> None:
        """What was kept."""
        self.pool.write(np.array([page], np.int32), kept())
