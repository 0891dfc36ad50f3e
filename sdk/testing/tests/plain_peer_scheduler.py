"""The scheduler half of the plain connector between engines. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.interfaces.kv_connector import Found, Held, KVConnectorScheduler, Pages, Transferable, Transferred

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext


class PeerSection(msgspec.Struct, kw_only=True):
    """Of one step: transfers that may be read, requests whose pages are to be filled, and what has ended.

    Args:
        offers: page of each block, by transfer.
        fetches: (request, engine, transfer, page of each block).
        withdrawn: transfers.
        cancelled: requests.
        unwanted: (engine, transfer).
    """

    offers: dict[str, dict[int, int]] = {}
    fetches: list[tuple[str, str, str, dict[int, int]]] = []
    withdrawn: list[str] = []
    cancelled: list[str] = []
    unwanted: list[tuple[str, str]] = []


class PeerNews(msgspec.Struct, kw_only=True):
    """Of one rank: requests whose fetch has ended, pages that failed, transfers that nobody wants any more."""

    rank: int
    fetched: list[str] = []
    failed: list[int] = []
    sent: list[str] = []


class PeerScheduler(KVConnectorScheduler):
    """See the module. The option `name` is the engine's."""

    def __init__(self, context: CoreContext) -> None:
        self.name: str = context.options.name  # type: ignore[union-attr]
        self.identity = context.identity.hex()
        self.block_size = context.layout.block_size
        self.world = context.parallel.world
        self.numbers = itertools.count()
        self.section = PeerSection()
        self.found: dict[str, dict[str, Any]] = {}  # what was told of requests that have no room
        self.tried: set[str] = set()
        self.loading: dict[str, int] = {}  # ranks that are not done
        self.held: dict[str, str] = {}  # transfer of each request
        self.wanted: dict[str, int] = {}  # of each transfer: ranks by which it is

    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        """What the other engine has, if it is of this one's model."""
        params = request.kv_transfer or {}
        if "remote_request_id" not in params or request.request_id in self.tried:
            return None
        if not self.believes(params):
            self.leave(request)
            return None
        self.found[request.request_id] = params
        most = (request.num_prompt_tokens - 1) // self.block_size * self.block_size
        return Found(most - num_local, asynchronous=True) if most > num_local else None

    def believes(self, params: dict[str, Any]) -> bool:
        """Whether it is of the same model."""
        return bool(params["identity"] == self.identity)

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        """Fetch them."""
        params = self.found.pop(request.request_id)
        self.tried.add(request.request_id)
        fetch = request.request_id, params["remote_host"], params["remote_request_id"], _by_block(pages)
        self.section.fetches.append(fetch)
        self.loading[request.request_id] = self.world

    def leave(self, request: Transferable) -> None:
        """Its pages are not needed, if they were not fetched."""
        params = self.found.pop(request.request_id, request.kv_transfer) or {}
        if "remote_request_id" in params and request.request_id not in self.tried:
            self.section.unwanted.append((params["remote_host"], params["remote_request_id"]))
        self.tried.add(request.request_id)

    def finished(self, request: Transferable, pages: Sequence[Pages]) -> Held:
        """Hold them for whoever was promised them."""
        self.leave(request)
        self.tried.discard(request.request_id)
        if not (request.kv_transfer or {}).get("do_remote_decode"):
            return Held()
        transfer = f"{self.name} {next(self.numbers)}"
        self.section.offers[transfer] = _by_block(pages)
        self.held[request.request_id] = transfer
        self.wanted[transfer] = self.world
        told = {"remote_host": self.name, "remote_request_id": transfer, "identity": self.identity}
        return Held(told, 60.0)

    def aborted(self, request_id: str) -> None:
        """Leave, cancel, withdraw."""
        if (params := self.found.pop(request_id, None)) is not None:
            self.section.unwanted.append((params["remote_host"], params["remote_request_id"]))
        self.tried.discard(request_id)
        if request_id in self.loading:
            self.section.cancelled.append(request_id)
        if (transfer := self.held.pop(request_id, None)) is not None:
            del self.wanted[transfer]
            self.section.offers.pop(transfer, None)
            self.section.withdrawn.append(transfer)

    def plan_section(self) -> bytes | None:
        """What is to be done."""
        section, self.section = self.section, PeerSection()
        return None if section == PeerSection() else msgspec.msgpack.encode(section)

    def take(self, news: Sequence[bytes]) -> Transferred:
        """When every rank says so."""
        loaded: list[str] = []
        sent: list[str] = []
        failed: list[int] = []
        for told in (msgspec.msgpack.decode(one, type=PeerNews) for one in news):
            failed += told.failed
            loaded += [request_id for request_id in told.fetched if self._last(self.loading, request_id)]
            for transfer in told.sent:
                if self._last(self.wanted, transfer):
                    request_id = next(name for name, its in self.held.items() if its == transfer)
                    del self.held[request_id]
                    sent.append(request_id)
        return Transferred(loaded, sent, np.unique(np.array(failed, np.int32)))

    def _last(self, ranks: dict[str, int], name: str) -> bool:
        """Whether this rank was the last."""
        if name not in ranks:
            return False
        ranks[name] -= 1
        return not ranks[name] and ranks.pop(name) == 0


def _by_block(several: Sequence[Pages]) -> dict[int, int]:
    ((_, first, pages),) = several
    return {first + i: page for i, page in enumerate(pages.tolist())}
