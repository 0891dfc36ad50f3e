"""Which place in host memory holds which page of which request, and what is said of it to the worker's half. No torch.

A place that becomes free is given out again from the next plan on: within one plan all copies out come before all
copies in, so a place must not be filled anew by the plan that still reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.interfaces.kv_connector import KVConnectorScheduler, SwapUsage
from engine.process import wire

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext

_EMPTY = np.empty(0, np.int32)


class Copies(msgspec.Struct, kw_only=True):
    """Copies between pages of the pool and places in host memory; those out come first.

    Args:
        out_page, out_place: int32 [m]; place out_place[i] gets what page out_page[i] holds.
        in_page, in_place: int32 [n]; page in_page[i] gets what place in_place[i] holds.
        lost: int32 [k]; pages that were to be filled, and whose content has made room for others.
    """

    out_page: np.ndarray
    out_place: np.ndarray
    in_page: np.ndarray
    in_place: np.ndarray
    lost: np.ndarray = msgspec.field(default_factory=lambda: _EMPTY)


class HostScheduler(KVConnectorScheduler):
    """See there: what it keeps, it never loses."""

    def __init__(self, context: CoreContext) -> None:
        self._total = context.swap_space // context.layout.page_bytes
        self._free = np.arange(self._total - 1, -1, -1, dtype=np.int32)  # a stack: its end is taken first
        self._num_free = self._total
        self._num_used = 0
        self._places: dict[str, np.ndarray] = {}
        self._freed: list[np.ndarray] = []
        self._out: list[tuple[np.ndarray, np.ndarray]] = []
        self._in: list[tuple[np.ndarray, np.ndarray]] = []
        self._lost: list[int] = []

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        assert request_id not in self._places
        if pages.size > self._num_free:
            return False
        places = self._take_places(pages.size)
        self._num_used += pages.size
        self._places[request_id] = places
        self._out.append((pages, places))
        return True

    def _take_places(self, n: int) -> np.ndarray:
        """So many of the free places, from the lowest up: those in a row are copied in one piece."""
        self._num_free -= n
        return self._free[self._num_free : self._num_free + n][::-1].copy()

    def swap_in(self, request_id: str, places: np.ndarray, pages: np.ndarray) -> None:
        self._in.append((pages, self._places[request_id][places]))
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        self._freed.append(self._places.pop(request_id))
        self._num_used -= self._freed[-1].size

    def plan_section(self) -> bytes | None:
        for places in self._freed:
            self._free[self._num_free : self._num_free + places.size] = places[::-1]
            self._num_free += places.size
        self._freed.clear()
        if not (self._out or self._in or self._lost):
            return None
        (out_page, out_place), (in_page, in_place) = _columns(self._out), _columns(self._in)
        self._out = []
        self._in = []
        lost = np.array(self._lost, np.int32)
        self._lost = []
        return wire.encode(
            Copies(out_page=out_page, out_place=out_place, in_page=in_page, in_place=in_place, lost=lost)
        )

    def usage(self) -> SwapUsage:
        return SwapUsage(self._num_used, self._total)

    def check_integrity(self) -> None:
        everywhere = np.concatenate([self._free[: self._num_free], *self._freed, *self._places.values()])
        assert np.array_equal(np.sort(everywhere), np.arange(self._total)), "a place is lost or given twice"
        assert self._num_used == sum(places.size for places in self._places.values())


def _columns(copies: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if not copies:
        return _EMPTY, _EMPTY
    pages, places = zip(*copies, strict=True)
    return np.concatenate(pages), np.concatenate(places)
