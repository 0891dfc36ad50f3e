"""The tier's second use: the room that preempted requests leave keeps blocks that were computed, so that prompts that
begin alike find them when the device has given them up. No torch.

Blocks make room for requests, and for newer blocks: those that were not used for longest go first. What this plan reads
stays until the next: within one plan all copies out come before all copies in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from engine.interfaces.kv_connector import NO_PAGES, Found, Held, Pages, Transferable, Transferred
from engine.types.kv import KVTable
from engine_kit.kv_blocks import first_seen, keys_to_find, longest_prefix, whole_blocks
from engine_reference.connector_host.scheduler_half import HostScheduler

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext


class CachingHostScheduler(HostScheduler):
    """See there. Loads are synchronous: they are copies within a machine."""

    def __init__(self, context: CoreContext) -> None:
        super().__init__(context)
        self._layout = context.layout
        self._blocks: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        """The place of each block, by table and key; those that were not used for longest stand first."""
        self._read: set[int] = set()
        """Places of blocks that the next plan reads."""
        self._found: set[str] = set()

    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        """Blocks that are kept, one after the other, behind those in the pool."""
        if not self._blocks:
            return None
        more = longest_prefix(self._layout, keys_to_find(self._layout, request), num_local, self._has) - num_local
        if more <= 0:
            return None
        self._found.add(request.request_id)
        return Found(more)

    def _has(self, table: KVTable, keys: Sequence[bytes]) -> list[bool]:
        return [(table.index, key) in self._blocks for key in keys]

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        """Have what was found copied into these pages. What made room for others meanwhile is told as failed."""
        if request.request_id not in self._found:
            return
        self._found.remove(request.request_id)
        into: list[int] = []
        places: list[int] = []
        for block in reversed(whole_blocks(self._layout, request, pages, first, end)):
            key = block.table.index, block.key
            if key in self._blocks:
                self._blocks.move_to_end(key)  # the first block last: without it the others are worth nothing
                into.append(block.page)
                places.append(self._blocks[key])
            elif block.number >= first_seen(block.table, end):
                self._lost.append(block.page)
        self._read.update(places)
        self._in.append((np.array(into[::-1], np.int32), np.array(places[::-1], np.int32)))

    def computed(self, request: Transferable, pages: Sequence[Pages], end: int) -> None:
        """Keep the blocks that are not kept yet, as far as there is room, or older ones make it."""
        new = {
            (block.table.index, block.key): block.page
            for block in whole_blocks(self._layout, request, pages, 0, end)
            if (block.table.index, block.key) not in self._blocks
        }
        if not new:
            return
        places = self._take_places(min(len(new), self._make_room(len(new))))
        for key, place in zip(new, places.tolist(), strict=False):
            self._blocks[key] = place
        self._out.append((np.array(list(new.values())[: places.size], np.int32), places))

    def finished(self, request: Transferable, pages: Sequence[Pages]) -> Held:
        """Its blocks were in use until now: those of its end go before those of its start."""
        for table in self._layout.tables:
            for key in reversed(request.block_keys(table.index)):
                if (table.index, key) in self._blocks:
                    self._blocks.move_to_end((table.index, key))
        self._found.discard(request.request_id)
        return Held()

    def aborted(self, request_id: str) -> None:
        """Nothing is wanted for it any more."""
        self._found.discard(request_id)

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        """Requests go before blocks."""
        if pages.size > self._num_free + len(self._blocks) - len(self._read):
            return False
        self._make_room(pages.size)
        return super().swap_out(request_id, pages)

    def plan_section(self) -> bytes | None:
        """What is read may make room from the next plan on."""
        self._read.clear()
        return super().plan_section()

    def take(self, news: Sequence[bytes]) -> Transferred:
        """Pages that were not filled, on each rank the same."""
        return Transferred(
            failed=np.unique(np.concatenate([NO_PAGES, *(np.frombuffer(one, np.int32) for one in news)]))
        )

    def check_integrity(self) -> None:
        """Blocks have places of their own."""
        self._freed.append(np.array(list(self._blocks.values()), np.int32))
        try:
            super().check_integrity()
        finally:
            self._freed.pop()
        assert self._read <= set(self._blocks.values()), "a place that is read has made room"

    def _make_room(self, n: int) -> int:
        """Let blocks go until there are n free places, or none can go; how many there are."""
        for key in list(islice(self._blocks, max(0, n - self._num_free) + len(self._read))):
            if self._num_free >= n:
                break
            if self._blocks[key] not in self._read:
                self._free[self._num_free] = self._blocks.pop(key)
                self._num_free += 1
        return self._num_free
