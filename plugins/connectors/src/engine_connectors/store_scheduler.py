"""The scheduler half of connectors that keep pages by key. No torch.

It asks the store's directory which blocks of a prompt are there, says in plans which pages are to be read and written,
and counts the ranks that have read theirs. What the workers could not do is known a little later, and costs a block
that is computed again, never a wrong one: a page is checked when it is read.

Engines that share a store can divide a request. Who computes a prompt for another (`do_remote_decode` of vLLM's
proxies) answers with `do_remote_prefill` and three words more: `pool`; `num_tokens`, how many tokens its blocks have;
and its `identity`. Who goes on then waits for blocks that are still being written.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from engine.interfaces.kv_connector import (
    LATER,
    LOOKUP_SECONDS,
    NO_PAGES,
    Found,
    Held,
    KVConnectorScheduler,
    Pages,
    Transferable,
    Transferred,
)
from engine.process import wire
from engine.types.kv import KVTable
from engine_connectors.pages import Directory, page_key
from engine_kit.kv_blocks import first_seen, keys_to_find, longest_prefix, whole_blocks

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext

log = logging.getLogger("engine.connectors")

_MOST_KNOWN = 200_000
"""Keys that are remembered as kept: the oldest are then asked for, or written, once more."""
PATIENCE_SECONDS = 1.0
"""How long a prompt that another engine has computed waits while no more of it comes into the store; then what is
missing is computed."""
ASK_AGAIN_SECONDS = 0.005
WARN_EVERY = 50
"""The first prompt of an engine that is another is told, and then every fiftieth: who asks names the engine."""


class Load(msgspec.Struct, kw_only=True):
    """Pages of one request to be filled.

    Args:
        number: by which ranks tell that they are.
        keys: one a page.
        pages: int32 [n].
    """

    number: int
    keys: list[bytes]
    pages: np.ndarray


class Section(msgspec.Struct, kw_only=True):
    """What one plan has for the worker half.

    Args:
        save_keys, save_pages: what these pages, int32 [m], hold before the plan runs is kept under these keys.
        loads: pages to be filled.
        used: keys of pages in use, those that are to be kept longest first.
    """

    save_keys: list[bytes] = msgspec.field(default_factory=list)
    save_pages: np.ndarray = msgspec.field(default_factory=lambda: NO_PAGES)
    loads: list[Load] = msgspec.field(default_factory=list)
    used: list[bytes] = msgspec.field(default_factory=list)


class Loaded(msgspec.Struct, kw_only=True):
    """What `Load` of this number named is filled on one rank, but for those pages that could not be: int32 [n]."""

    number: int
    failed: np.ndarray


class News(msgspec.Struct, kw_only=True):
    """What a rank has done since it last told.

    Args:
        loaded: in no order.
        dropped: keys of pages that are not kept, whatever was thought of them.
        counts: since it last told, by name, see `Store.counts`.
    """

    loaded: list[Loaded]
    dropped: list[bytes]
    counts: dict[str, int]


_decode = wire.decoder(News).decode


class _Answer(NamedTuple):
    """What a lookup found.

    Args:
        num_local: tokens that were in the pool.
        num_tokens: of the prefix that can be had, with these.
        missing: keys that were asked for and are not there.
    """

    num_local: int
    num_tokens: int
    missing: list[bytes]


class _Coming(NamedTuple):
    """A prompt that is being written by another engine.

    Args:
        num_tokens: of the prefix that was there when it was asked for last.
        since: when it was seen to have become so long; minus infinity: nothing is waited for any more.
        until: when nothing is waited for any more, however much comes.
        next: when to ask again.
    """

    num_tokens: int
    since: float
    until: float
    next: float


class StoreScheduler(KVConnectorScheduler):
    """See there. All loads are asynchronous.

    Args:
        directory: what the store has.
        waits: whether asking it may take longer than a step can wait: then a thread asks, and the request waits.
    """

    def __init__(self, context: CoreContext, directory: Directory, *, waits: bool) -> None:
        self._identity = context.identity
        self._layout = context.layout
        self._num_ranks = context.parallel.world
        self._directory = directory
        self._asker = ThreadPoolExecutor(1, "kv-store-lookup") if waits else None
        self._asked: dict[str, Future[_Answer]] = {}
        self._found: dict[str, _Answer] = {}
        self._coming: dict[str, _Coming] = {}
        self._now = context.clock.monotonic
        # A request that waits for longer than that is computed as a whole, and what has come was in vain.
        self._most_seconds = getattr(context.options, "lookup_seconds", LOOKUP_SECONDS) / 2
        self._known: dict[bytes, None] = {}  # the oldest first
        self._loads: dict[int, tuple[str, list[np.ndarray]]] = {}
        """Whose each load under way is, and what the ranks that have ended it could not fill."""
        self._numbers = itertools.count()
        self._section = Section()
        self._save_pages: list[int] = []
        self._counts: dict[str, int] = {}
        self._num_strangers = 0

    # -- from the store ------------------------------------------------------------------------------------------------
    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        """Blocks that the store has, one after the other, behind those in the pool."""
        found = self._found.get(request.request_id)
        if found is None or found.num_local != num_local:
            coming = self._coming.get(request.request_id)
            if coming is not None and self._now() < coming.next:
                return LATER
            found = self._ask(request, num_local)
            if found is None or self._comes(request, found.num_tokens):
                return LATER
        if found.num_tokens <= num_local:
            self._found.pop(request.request_id, None)
            return None
        self._found[request.request_id] = found
        return Found(found.num_tokens - num_local, asynchronous=True)

    def _comes(self, request: Transferable, num_tokens: int) -> bool:
        """Whether more of the request than these tokens is likely to come, from an engine that has computed it."""
        params = request.kv_transfer or {}
        told = params.get("num_tokens")
        if not (params.get("do_remote_prefill") and params.get("pool")) or not isinstance(told, int):
            return False
        size, now = self._layout.block_size, self._now()
        if num_tokens >= min(told, request.num_loadable, request.num_prompt_tokens - 1) // size * size:
            return False
        coming = self._coming.get(request.request_id)
        if coming is None and params.get("identity") != self._identity.hex():
            self._num_strangers += 1
            if self._num_strangers % WARN_EVERY == 1:
                log.warning(
                    "request %s computes its prompt itself: the other engine has another model, dtype, page format or "
                    "division over ranks (%d so far)",
                    request.request_id,
                    self._num_strangers,
                )
            return False
        since = now if coming is None or num_tokens > coming.num_tokens else coming.since
        until = now + self._most_seconds if coming is None else coming.until
        if now - since < PATIENCE_SECONDS and now < until:
            self._coming[request.request_id] = _Coming(num_tokens, since, until, now + ASK_AGAIN_SECONDS)
            return True
        if since > -math.inf:
            self._coming[request.request_id] = _Coming(num_tokens, -math.inf, until, now)
            self._counts["never_came"] = self._counts.get("never_came", 0) + 1
            log.warning("request %s: %d of %d tokens did not come", request.request_id, told - num_tokens, told)
        return False

    def _ask(self, request: Transferable, num_local: int) -> _Answer | None:
        """None: the answer is not there yet."""
        if self._asker is None:
            return self._taken(self._answer(keys_to_find(self._layout, request), num_local))
        asked = self._asked.get(request.request_id)
        if asked is None:
            keys = [list(of_table) for of_table in keys_to_find(self._layout, request)]
            asked = self._asked[request.request_id] = self._asker.submit(self._answer, keys, num_local)
        if not asked.done():
            return None
        del self._asked[request.request_id]
        return self._taken(asked.result())._replace(num_local=num_local)

    def _taken(self, answer: _Answer) -> _Answer:
        """Others than the core's thread do not touch what is known."""
        for key in answer.missing:  # given up since it was known
            self._known.pop(key, None)
        return answer

    def _answer(self, keys: Sequence[Sequence[bytes]], num_local: int) -> _Answer:
        missing: list[bytes] = []
        num_tokens = longest_prefix(self._layout, keys, num_local, partial(self._has, missing))
        return _Answer(num_local, num_tokens, missing)

    def _has(self, missing: list[bytes], table: KVTable, block_keys: Sequence[bytes]) -> Iterator[bool]:
        keys = [page_key(self._identity, table.index, one) for one in block_keys]
        for key, there in zip(keys, self._directory.has(keys), strict=True):
            if not there:
                missing.append(key)
            yield there

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        """Have what was found read into these pages, of a sliding table what is seen behind it."""
        if self._found.pop(request.request_id, None) is None:
            return
        blocks = whole_blocks(self._layout, request, pages, first, end)
        blocks = [block for block in blocks if block.number >= first_seen(block.table, end)]
        keys = [page_key(self._identity, block.table.index, block.key) for block in blocks]
        self._know(keys)
        number = next(self._numbers)
        self._loads[number] = request.request_id, []
        wanted = np.array([block.page for block in blocks], np.int32)
        self._section.loads.append(Load(number=number, keys=keys, pages=wanted))

    # -- to the store --------------------------------------------------------------------------------------------------
    def computed(self, request: Transferable, pages: Sequence[Pages], end: int) -> None:
        """Have those kept that are not known to be."""
        new: list[bytes] = []
        for block in whole_blocks(self._layout, request, pages, 0, end):
            key = page_key(self._identity, block.table.index, block.key)
            if key not in self._known:
                new.append(key)
                self._save_pages.append(block.page)
        self._section.save_keys += new
        self._know(new)

    def finished(self, request: Transferable, pages: Sequence[Pages]) -> Held:
        """Its blocks were in use until now: those of its end are given up before those of its start."""
        for table in self._layout.tables:
            keys = [page_key(self._identity, table.index, one) for one in request.block_keys(table.index)]
            self._section.used += [key for key in keys if key in self._known]
        self.aborted(request.request_id)
        params, size = request.kv_transfer or {}, self._layout.block_size
        whole = request.num_prompt_tokens // size * size
        if not params.get("do_remote_decode") or not (whole and pages):
            return Held()
        told = {"do_remote_prefill": True, "do_remote_decode": False, "pool": True, "num_tokens": whole}
        return Held({**told, "identity": self._identity.hex()})

    def aborted(self, request_id: str) -> None:
        """Nothing more is wanted for it. Loads under way go on, and are told."""
        self._found.pop(request_id, None)
        self._asked.pop(request_id, None)
        self._coming.pop(request_id, None)

    def _know(self, keys: Sequence[bytes]) -> None:
        self._known |= dict.fromkeys(keys)
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    # -- plans and news ------------------------------------------------------------------------------------------------
    def plan_section(self) -> bytes | None:
        """What has been decided since the last plan: None where that is nothing."""
        section = self._section
        if not (section.save_keys or section.loads or section.used):
            return None
        section.save_pages = np.array(self._save_pages, np.int32)
        self._section = Section()
        self._save_pages = []
        return wire.encode(section)

    def take(self, news: Sequence[bytes]) -> Transferred:
        """Requests are loaded when all ranks have told so."""
        loaded: list[str] = []
        failed: list[np.ndarray] = [NO_PAGES]
        for told in map(_decode, news):
            for key in told.dropped:
                self._known.pop(key, None)
            for name, count in told.counts.items():
                self._counts[name] = self._counts.get(name, 0) + count
            for one in told.loaded:
                request_id, failures = self._loads[one.number]
                failures.append(one.failed)
                if len(failures) == self._num_ranks:
                    loaded.append(request_id)
                    failed += failures
                    del self._loads[one.number]
        return Transferred(loaded=loaded, failed=np.unique(np.concatenate(failed)))

    def counts(self) -> dict[str, int]:
        """What became of pages on all ranks since start: see `Store.counts`."""
        return self._counts

    def close(self) -> None:
        """Ask no more. Idempotent."""
        if self._asker is not None:
            self._asker.shutdown(wait=False, cancel_futures=True)
        self._directory.close()
