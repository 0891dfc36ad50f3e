"""The scheduler half: which requests' pages are waited for, which wait for others, and what other engines are told of
them. No torch.

With requests travel the parameters of vLLM's proxies (`do_remote_decode`, `do_remote_prefill`, `remote_engine_id`,
`remote_block_ids`, `remote_host`, `remote_port`, `tp_size`: all its ranks), and five more: `remote_request_id`, the
transfer's name; `num_tokens`, how many tokens the pages hold; `identity`, of the engine that has them; `push`, where
they are pushed; `follow`, where they are pulled while they are computed. In both of these whoever asks gives the name.

What a step computes of a prompt goes to the other engine layer by layer, as copies: the request may lose its pages
before its end. When it has ended well its pages are held, and the rest is read there. One that was computed in another
order than from its first token to its last, since pages were lost or could not be loaded, is read anew as a whole.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engine.interfaces.kv_connector import Found, Held, KVConnectorScheduler, Pages, Transferable, Transferred
from engine.process import wire
from engine_connectors.tcp.messages import ExchangeNews, ExchangeSection, Fetch, Offer, TablePages

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine_connectors.tcp.card import TCPOptions

log = logging.getLogger("engine.connectors.tcp")

MOST_RANKS = 4096
NAMES_NOBODY = "its kv_transfer_params name no transfer of its own, or no engine that --kv-connector.peers allows"


class TCPScheduler(KVConnectorScheduler):
    """See the module."""

    def __init__(self, context: CoreContext) -> None:
        self._options = cast("TCPOptions", context.options)
        self._key = context.identity
        self._identity = context.identity.hex()
        self._block_size = context.layout.block_size
        self._world = context.parallel.world
        self._engine_id = uuid.uuid4().hex
        self._names = itertools.count()
        self._host = self._options.advertise or self._options.host
        self._section = ExchangeSection()
        self._ranks: dict[str, set[int]] = {}  # fetches under way: the ranks that are done
        self._wanted: dict[str, str] = {}  # requests that others are to go on with, and their transfers' names
        self._sent: dict[str, set[int]] = {}  # of these, by transfer: the ranks that nobody wants anything of any more
        self._request_of: dict[str, str] = {}
        self._held: set[str] = set()  # requests whose pages wait
        self._left: set[str] = set()  # requests whose push was given up while they were computed
        self._over: set[str] = set()  # requests whose transfer was tried, or is of no use
        self._found: dict[str, tuple[Transferable, int, int]] = {}  # which tokens were found of those that have no room
        self._computed: dict[str, int] = {}  # tokens that steps compute of those that others wait for
        self._anew: set[str] = set()  # of these, those of which earlier copies do not stand
        self._decode = wire.decoder(ExchangeNews).decode
        self._counts: Counter[str] = Counter()

    # -- an engine that goes on ----------------------------------------------------------------------------------------
    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        params = request.kv_transfer
        if not params or not params.get("do_remote_prefill") or request.request_id in self._over:
            return None
        if self._options.role == "prefill":
            self._refuse(request, "this engine's role is prefill")
            return None
        if not _is_ahead(params) and params.get("identity") != self._identity:
            self._refuse(request, "the other engine has another model, dtype, page format or division over ranks")
            return None
        known = params.get("num_tokens", request.num_prompt_tokens)
        if not isinstance(known, int) or not self._usable(params):
            self._refuse(request, NAMES_NOBODY)
            return None
        most = min(request.num_prompt_tokens - 1, request.num_loadable, known) // self._block_size * self._block_size
        if most <= num_local:
            self._release(request)
            return None
        self._found[request.request_id] = request, num_local, most
        return Found(most - num_local, asynchronous=True)

    def _refuse(self, request: Transferable, why: str) -> None:
        log.warning("request %s computes its prompt itself: %s", request.request_id, why)
        self._release(request)

    def _release(self, request: Transferable) -> None:
        """Let the engine that has its pages know that they are not wanted, unless they were fetched, or it knows."""
        params = request.kv_transfer
        if not params or not params.get("do_remote_prefill") or request.request_id in self._over:
            return
        self._over.add(request.request_id)
        self._found.pop(request.request_id, None)
        if self._usable(params):
            address = "" if params.get("push") else self._address(params)
            ranks = params.get("tp_size")
            ranks = ranks if isinstance(ranks, int) and 0 < ranks <= MOST_RANKS else self._world
            self._section.unwanted.append((address, params["remote_request_id"], ranks))

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        params = request.kv_transfer or {}
        found = self._found.get(request.request_id)
        if found is None or found[1:] != (first, end):
            return self._computes(request, pages, first, end)
        address = "" if params.get("push") else self._address(params)
        follows = bool(params.get("follow"))
        fetch = Fetch(request.request_id, params["remote_request_id"], _tables(pages), address, follows)
        self._section.fetches.append(fetch)
        self._ranks[request.request_id] = set()
        self._over.add(request.request_id)
        del self._found[request.request_id]
        return None

    def _usable(self, params: dict[str, Any]) -> bool:
        """Whether these name a transfer, and an engine to connect to where this one has to. Clients may send them."""
        name = params.get("remote_request_id")
        if not isinstance(name, str) or not name.isascii():
            return False
        return bool(params.get("push") and params.get("do_remote_prefill")) or self._address(params) != ""

    def _address(self, params: dict[str, Any]) -> str:
        """Of the other engine's first rank, host:port; "" where it is none that this one may connect to."""
        host, port = params.get("remote_host"), params.get("remote_port")
        good = isinstance(host, str) and isinstance(port, int) and 0 < port < 65536 and self._options.knows(host)
        return f"{host}:{port:d}" if good else ""

    # -- an engine that computes prompts for others --------------------------------------------------------------------
    def _computes(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        """The plan being made computes these tokens: whole blocks among them go out layer by layer."""
        params = request.kv_transfer or {}
        name = request.request_id
        if not params.get("do_remote_decode") or not _is_ahead(params) or self._options.role == "decode":
            return
        if name in self._left or not self._may_push(request):
            return
        if self._computed.get(name, first) != first:
            self._anew.add(name)
        self._computed[name] = end
        blocks = min(end, request.num_prompt_tokens) // self._block_size
        chunk = [_until(one, blocks) for one in pages]
        if name not in self._anew and any(one.pages.size for one in chunk):
            transfer = self._transfer(request)
            self._section.chunks.append(Offer(transfer, _tables(chunk), self._pushed_to(params), last=False))

    def computed(self, request: Transferable, pages: Sequence[Pages], end: int) -> None:
        self._release(request)  # which the device has all of, so that nobody looked it up

    def finished(self, request: Transferable, pages: Sequence[Pages]) -> Held:
        self._release(request)
        self._over.discard(request.request_id)
        params = request.kv_transfer or {}
        left = request.request_id in self._left
        self._left.discard(request.request_id)
        self._computed.pop(request.request_id, None)
        anew = request.request_id in self._anew
        self._anew.discard(request.request_id)
        if not params.get("do_remote_decode") or self._options.role == "decode" or left:
            return Held()
        if _is_ahead(params) and not self._may_push(request):
            log.warning("request %s is not pushed: %s", request.request_id, NAMES_NOBODY)
            return Held()
        blocks = request.num_prompt_tokens // self._block_size
        held = [_until(one, blocks) for one in pages]
        if not any(one.pages.size for one in held):
            return Held()
        transfer = self._transfer(request)
        self._section.offers.append(Offer(transfer, _tables(held), self._pushed_to(params), anew=anew))
        self._held.add(request.request_id)
        told = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_block_ids": [one.pages.tolist() for one in held],
            "remote_host": self._host,
            "remote_port": self._options.port,
            "remote_request_id": transfer,
            "num_tokens": blocks * self._block_size,
            "identity": self._identity,
            "tp_size": self._world,
        }
        return Held(None if _is_ahead(params) else told, self._options.lease_seconds)

    def _may_push(self, request: Transferable) -> bool:
        """Whether its parameters give a name that no other request has, and, of a push, say where to."""
        params = request.kv_transfer or {}
        name = params.get("remote_request_id")
        if not (self._usable(params) if params.get("push") else isinstance(name, str) and name.isascii()):
            return False
        return self._request_of.get(params["remote_request_id"], request.request_id) == request.request_id

    def _pushed_to(self, params: dict[str, Any]) -> str:
        return self._address(params) if params.get("push") else ""

    def _transfer(self, request: Transferable) -> str:
        """The transfer's name: others may ask for it."""
        params = request.kv_transfer or {}
        if (transfer := self._wanted.get(request.request_id)) is None:
            ahead = _is_ahead(params)
            transfer = params["remote_request_id"] if ahead else f"{self._engine_id}-{next(self._names)}"
            self._wanted[request.request_id] = transfer
            self._request_of[transfer] = request.request_id
            self._sent[transfer] = set()
        return transfer

    # -- both ----------------------------------------------------------------------------------------------------------
    def aborted(self, request_id: str) -> None:
        if (found := self._found.get(request_id)) is not None:
            self._release(found[0])
        self._computed.pop(request_id, None)
        self._anew.discard(request_id)
        self._over.discard(request_id)
        self._left.discard(request_id)
        if request_id in self._ranks:
            self._section.cancelled.append(request_id)
        if (transfer := self._wanted.get(request_id)) is not None:
            self._forget(transfer)
            self._section.withdrawn.append(transfer)
            self._section.offers = [offer for offer in self._section.offers if offer.transfer != transfer]
            self._section.chunks = [chunk for chunk in self._section.chunks if chunk.transfer != transfer]

    def _forget(self, transfer: str) -> None:
        request_id = self._request_of.pop(transfer)
        self._held.discard(request_id)
        del self._wanted[request_id]
        del self._sent[transfer]

    def plan_section(self) -> bytes | None:
        if self._section == ExchangeSection():
            return None
        section, self._section = self._section, ExchangeSection()
        section.identity = self._key
        section.engine_id = self._engine_id
        return wire.encode(section)

    def take(self, news: Sequence[bytes]) -> Transferred:
        loaded: list[str] = []
        sent: list[str] = []
        failed: list[int] = []
        for told in map(self._decode, news):
            failed += told.failed
            self._counts.update(told.counts)
            for request_id in told.fetched:
                ranks = self._ranks[request_id]
                ranks.add(told.rank)
                if len(ranks) == self._world:
                    del self._ranks[request_id]
                    loaded.append(request_id)
            for transfer in told.sent:
                if (done := self._sent.get(transfer)) is None:
                    continue  # its hold has run out
                done.add(told.rank)
                if len(done) == self._world:
                    request_id = self._request_of[transfer]
                    if request_id in self._held:
                        sent.append(request_id)
                    else:
                        self._left.add(request_id)
                    self._forget(transfer)
        return Transferred(loaded, sent, np.array(failed, np.int32))

    def counts(self) -> Counter[str]:
        return self._counts

    def check_integrity(self) -> None:
        assert set(self._wanted.values()) == self._request_of.keys() == self._sent.keys()
        assert self._held <= self._wanted.keys()
        assert all(len(ranks) < self._world for ranks in self._ranks.values())


def _is_ahead(params: dict[str, Any]) -> bool:
    """Whether the other engine waits already, while the prompt is computed."""
    return bool(params.get("push") or params.get("follow"))


def _until(pages: Pages, block: int) -> Pages:
    """Those of the blocks before this one."""
    return pages._replace(pages=pages.pages[: max(0, block - pages.first_block)])


def _tables(pages: Sequence[Pages]) -> list[TablePages]:
    return [TablePages(one.table, one.first_block, one.pages) for one in pages]
