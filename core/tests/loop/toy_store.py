"""A store of pages in a dictionary, with delays, losses and reordering: the smallest connector of all kinds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from pydantic import BaseModel

from engine.interfaces.context import CoreContext, WorkerContext
from engine.interfaces.kv_connector import (
    LATER,
    Found,
    Held,
    KVConnectorCard,
    KVConnectorScheduler,
    KVConnectorWorker,
    Pages,
    Transferable,
    Transferred,
)


class ToyOptions(BaseModel):
    """How the store behaves.

    Args:
        asynchronous: the share of requests whose pages travel by themselves.
        later: the share of lookups that are answered so.
        delay: the most steps that a load takes.
        loss: the share of pages that get lost on the way.
        held: seconds for which the pages of ended requests are held.
        seed: of all this.
    """

    asynchronous: float = 0.0
    later: float = 0.0
    delay: int = 0
    loss: float = 0.0
    held: float = 0.0
    seed: int = 0


class Section(msgspec.Struct, kw_only=True):
    """Pages to save, to fill now, of earlier loads those whose requests are over, and pages to fill by and by."""

    save: list[tuple[bytes, int]] = []
    fill: list[tuple[bytes, int]] = []
    drop: list[str] = []
    bring: dict[str, list[tuple[bytes, int]]] = {}


class News(msgspec.Struct, kw_only=True):
    """Of one rank: requests whose pages are there, pages that are not, holds that nobody needs."""

    rank: int
    loaded: list[str] = []
    failed: list[int] = []
    sent: list[str] = []


class Shelf:
    """What several engines share: pages by rank and key."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, bytes], torch.Tensor] = {}
        self.keys: set[bytes] = set()


class ToyScheduler(KVConnectorScheduler):
    shelf: ClassVar[Shelf] = Shelf()

    def __init__(self, context: CoreContext) -> None:
        self.options = context.options or ToyOptions()
        self.rng = random.Random(self.options.seed)
        self.layout = context.layout
        self.size = context.layout.block_size
        self.ranks = context.parallel.world
        self.identity = context.identity
        self.section = Section()
        self.loading: dict[str, set[int]] = {}
        self.found: dict[str, Found] = {}
        self.held: set[str] = set()
        self.num_found = self.num_lookups = 0

    def key(self, key: bytes) -> bytes:
        return self.identity + key

    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        self.num_lookups += 1
        if self.rng.random() < self.options.later:
            return LATER
        end = request.num_loadable // self.size
        while end * self.size > num_local and not self._has(request, num_local // self.size, end):
            end -= 1
        if end * self.size <= num_local:
            return None
        self.num_found += 1
        found = Found(end * self.size - num_local, self.rng.random() < self.options.asynchronous)
        self.found[request.request_id] = found
        return found

    def _has(self, request: Transferable, start: int, end: int) -> bool:
        for table in self.layout.tables:
            window = table.window
            first = 0 if window is None else max(0, end * self.size - window + 1) // self.size
            keys = request.block_keys(table.index)[max(first, start) : end]
            if not all(self.key(key) in self.shelf.keys for key in keys):
                return False
        return True

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        found = self.found.pop(request.request_id)
        assert 0 < end - first <= found.num_tokens and not first % self.size and not end % self.size
        moves = self._moves(request, pages)
        if found.asynchronous:
            self.section.bring[request.request_id] = moves
            self.loading[request.request_id] = set(range(self.ranks))
        else:
            self.section.fill += moves

    def computed(self, request: Transferable, pages: Sequence[Pages], end: int) -> None:
        assert end > 0 and end % self.size == 0 and len(request.block_keys(0)) * self.size >= end
        self.section.save += self._moves(request, pages)

    def _moves(self, request: Transferable, pages: Sequence[Pages]) -> list[tuple[bytes, int]]:
        return [
            (self.key(request.block_keys(table)[first + place]), page)
            for table, first, of_table in pages
            for place, page in enumerate(of_table.tolist())
        ]

    def finished(self, request: Transferable, pages: Sequence[Pages]) -> Held:
        if not self.options.held or request.kv_transfer is None:
            return Held()
        self.held.add(request.request_id)
        return Held({"pages": sum(of.pages.size for of in pages)}, self.options.held)

    def aborted(self, request_id: str) -> None:
        self.found.pop(request_id, None)
        self.held.discard(request_id)
        if request_id in self.section.bring:
            self.section.bring[request_id] = []
        elif request_id in self.loading:
            self.section.drop.append(request_id)

    def plan_section(self) -> bytes | None:
        section, self.section = self.section, Section()
        if section == Section():
            return None
        return msgspec.msgpack.encode(section)

    def take(self, news: Sequence[bytes]) -> Transferred:
        told = [msgspec.msgpack.decode(one, type=News) for one in news]
        loaded = []
        for one in told:
            for request_id in one.loaded:
                self.loading[request_id].remove(one.rank)
                if not self.loading[request_id]:
                    del self.loading[request_id]
                    loaded.append(request_id)
        failed = np.array(sorted({page for one in told for page in one.failed}), np.int32)
        sent = sorted(self.held) if self.held and self.rng.random() < 0.5 else []
        self.held.difference_update(sent)
        return Transferred(loaded, sent, failed)


class ToyWorker(KVConnectorWorker):
    def __init__(self, context: WorkerContext) -> None:
        self.options = context.options or ToyOptions()
        self.rank = context.start.place.rank
        self.rng = random.Random(f"{self.options.seed} {self.rank}")
        self.shelf = ToyScheduler.shelf
        self.pending: dict[str, list[tuple[bytes, int]]] = {}
        self.told = News(rank=self.rank)
        self.fill: list[tuple[bytes, int]] = []

    def register(self, pool: torch.Tensor) -> None:
        self.pool = pool

    def begin(self, step_id: int, section: bytes | None) -> None:
        given = Section() if section is None else msgspec.msgpack.decode(section, type=Section)
        for key, page in given.save:
            self.shelf.pages[self.rank, key] = self.pool[page].clone()
            self.shelf.keys.add(key)
        for request_id in given.drop:
            if request_id in self.pending:  # and has not ended meanwhile
                self.pending[request_id] = []
        for request_id, moves in given.bring.items():
            self.pending[request_id] = [*moves, *[(b"", 0)] * self.rng.randint(0, self.options.delay)]
            self.rng.shuffle(self.pending[request_id])
        self.fill = given.fill

    def load(self, step_id: int) -> None:
        for key, page in self.fill:
            self._fill(key, page)
        for request_id in list(self.pending):
            moves = self.pending[request_id]
            for _ in range(self.rng.randint(0, 4)):
                if moves:
                    self._fill(*moves.pop())
            if not moves:
                del self.pending[request_id]
                self.told.loaded.append(request_id)

    def _fill(self, key: bytes, page: int) -> None:
        if not key:
            return
        if self.rng.random() < self.options.loss:
            self.told.failed.append(page)
            self.pool[page] = 7
        else:
            self.pool[page] = self.shelf.pages[self.rank, key]

    def news(self) -> bytes | None:
        told, self.told = self.told, News(rank=self.rank)
        return msgspec.msgpack.encode(told)


class ToyCard(KVConnectorCard):
    """Keeps pages in a dictionary of the process."""

    framework = "torch"
    Options = ToyOptions
    bodies: ClassVar[Mapping[str, Any]] = {"core": "toy_store:ToyScheduler", "worker": "toy_store:ToyWorker"}


class LayerwiseScheduler(ToyScheduler):
    """What a plan computes is saved with that plan, layer by layer, as a transfer to another engine would be."""

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        if request.request_id in self.found:
            return super().allocated(request, pages, first, end)
        whole = [Pages(table, block, of[: end // self.size - block]) for table, block, of in pages]
        self.section.save += self._moves(request, whole)
        return None

    def computed(self, request: Transferable, pages: Sequence[Pages], end: int) -> None:
        """Saved already."""


class LayerwiseWorker(ToyWorker):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.parts: dict[int, slice] = {}
        for group in context.start.layout.groups:
            for place, site in enumerate(group.sites):
                first = group.offset + place * group.layer_bytes
                self.parts[site] = slice(first, first + group.layer_bytes)
        self.save: list[tuple[bytes, int]] = []
        self.next = 0

    def begin(self, step_id: int, section: bytes | None) -> None:
        given = Section() if section is None else msgspec.msgpack.decode(section, type=Section)
        self.save = given.save
        given.save = []
        self.next = 0
        super().begin(step_id, msgspec.msgpack.encode(given))

    def load(self, step_id: int) -> None:
        for _, page in self.fill:
            self.pool[page] = 7

    def before_layer(self, site: int) -> None:
        part = self.parts[site]
        for key, page in self.fill:
            self.pool[page, part] = self.shelf.pages[self.rank, key][part]

    def after_layer(self, site: int) -> None:
        assert site == self.next, "layers come in order"
        self.next += 1
        part = self.parts[site]
        for key, page in self.save:
            kept = self.shelf.pages.setdefault((self.rank, key), torch.zeros_like(self.pool[page]))
            kept[part] = self.pool[page, part]

    def end(self, step_id: int) -> None:
        assert self.next == len(self.parts), "every layer of the step was told"
        self.shelf.keys.update(key for key, _ in self.save)


class LayerwiseCard(ToyCard):
    """The same, layer by layer."""

    layerwise = True
    bodies: ClassVar[Mapping[str, Any]] = {
        "core": "toy_store:LayerwiseScheduler",
        "worker": "toy_store:LayerwiseWorker",
    }
