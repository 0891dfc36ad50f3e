"""The servers behind the router, how busy they are, and which of them takes a request: drivers of point `router` say,
as they do for the engine cores of one server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from engine.interfaces.context import RouterContext
from engine.interfaces.router import RankLoad, Router, RouterCard, RouterNeed
from engine.plugin import Registry, Selection, choose_one
from engine.plugin.points import ROUTER
from engine.types.errors import ContractError
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine_router.connections import Address, Lost, Pool, Unreachable, ask_json_bytes

log = logging.getLogger("engine.router")

HEALTH_SECONDS = 5.0
"""In which a server has to tell of its health."""
MOST_MISSED = 3
"""Looks at a server's health without an answer after which it is taken for dead, and what waits for it ends."""
BLOCK_WORDS = 16
"""Words of four bytes, about a token each, that a router finds again, or not, as one block."""


class Backend:
    """One server.

    Attributes:
        role: "prefill", "decode", or "" for one that answers whole requests.
        rank: its place among those of its role.
        alive: whether it took connections, and said that it serves, when it was asked last.
        active: requests that were sent to it and have not ended.
        counts: requests by outcome: an HTTP status, "unreachable", "lost".
    """

    def __init__(self, address: str, role: str, rank: int) -> None:
        self.address = Address(address)
        self.role = role
        self.rank = rank
        self.pool = Pool(self.address)
        self.alive = True
        self.active = 0
        self.counts: Counter[str] = Counter()
        self._running = 0
        self._kv_usage = 0.0
        self._missed = 0
        self.engine_info: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Its address, as it was given."""
        return self.address.text

    def load(self) -> RankLoad:
        """What runs is what it told last; all else that was sent and has not ended waits."""
        return RankLoad(self.rank, self._running, max(0, self.active - self._running), self._kv_usage)

    def died(self, why: str) -> None:
        """It is offered nothing until it tells that it serves."""
        if self.alive:
            log.error("the server %s does not answer: %s", self.name, why)
        self.alive = False
        self.engine_info = None  # another may start in its place

    async def look(self) -> None:
        """Ask for its health."""
        try:
            status, body = await ask_json_bytes(self.pool, "/health", HEALTH_SECONDS)
        except (Unreachable, Lost) as error:
            return self.died(str(error) or "the connection was lost")
        except TimeoutError:
            self._missed += 1
            if self._missed >= MOST_MISSED:
                self.died(f"no sign of life, {self._missed} times")
                self.pool.drop()
            return None
        self._missed = 0
        if status != 200:
            return self.died(f"it is not serving ({status})")
        if not self.alive:
            log.warning("the server %s serves again", self.name)
        self.alive = True
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # another engine's tells less
            ranks = orjson.loads(body or b"{}")["ranks"]
            self._running = sum(int(rank["running"]) for rank in ranks)
            self._kv_usage = sum(float(rank["kv_cache_usage"]) for rank in ranks) / max(1, len(ranks))


class Group:
    """Servers of one role."""

    def __init__(self, backends: Sequence[Backend], selection: Selection[RouterCard], prefix_tokens: int) -> None:
        self.backends = backends
        context = RouterContext(
            num_ranks=len(backends),
            max_num_seqs=1,
            block_size=BLOCK_WORDS,
            cached_tokens=prefix_tokens,
            options=selection.options,
        )
        self._router: Router = selection.build(context)
        self._known_dead: set[int] = set()

    def choose(self, request: EngineRequest, tried: set[Backend]) -> Backend | None:
        """Who takes a request, of those that were not tried; those that live, if any does. None: nobody is left.

        Raises ContractError where the router fails.
        """
        left = [backend for backend in self.backends if backend not in tried]
        living = [backend for backend in left if backend.alive]
        self._tell_of_deaths()
        if len(living) < 2:
            return next(iter(living or left), None)
        try:
            chosen = self._router.route([request], [backend.load() for backend in living])
        except Exception as error:
            found = f"the router raised {type(error).__name__}: {error}"
            raise ContractError("choose a server", found, point="router") from error
        for backend in living:
            if backend.rank == chosen:
                return backend
        found = f"the router named {chosen!r}, offered were {', '.join(str(one.rank) for one in living)}"
        raise ContractError("choose a server", found, point="router")

    def _tell_of_deaths(self) -> None:
        dead = {backend.rank for backend in self.backends if not backend.alive}
        for rank in dead - self._known_dead:
            self._router.rank_died(rank)
        self._known_dead = dead


async def watch(groups: Sequence[Group], interval: float) -> None:
    """Look at every server again and again, until cancelled."""
    while True:
        await asyncio.gather(*(backend.look() for group in groups for backend in group.backends))
        await asyncio.sleep(interval)


_PROMPT_FIELDS = ("tools", "system", "instructions", "prompt", "messages", "input")
"""Of all protocols, in the order in which chat templates write them."""


_PARAMS = SamplingParams()


def routed_by(data: dict[str, Any], owner: bytes) -> EngineRequest:
    """What routers see of a body: its prompt as words of four bytes in place of tokens, which nobody has here. Requests
    of one `owner`, by the API key that they bring, may share a prefix cache."""
    text = b"".join(orjson.dumps(data[name])[:-1] for name in _PROMPT_FIELDS if data.get(name) is not None)
    words = np.frombuffer(text, "<i4", len(text) // 4).tolist()
    salt = f"{zlib.crc32(owner)} {data.get('cache_salt') or ''}"
    return EngineRequest(request_id="", prompt_token_ids=words, params=_PARAMS, cache_salt=salt)


def choose_router(registry: Registry, asked: str | None, options: dict[str, Any], most: int) -> Selection[RouterCard]:
    """The driver; `most`: servers of one role. Raises PluginError, ConfigError."""
    return choose_one(registry, ROUTER, RouterNeed(num_ranks=max(2, most)), asked, options)
