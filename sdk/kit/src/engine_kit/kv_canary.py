"""Checks of KV pages (`--kv-canary`), in the scheduler: which page should hold what (entry-point group `engine_parts`).
No torch.

Each page has a mark of 32 bytes at its end, which goes wherever the page goes: into a swap tier, a store, another
engine, a copy. It says what the page holds, of which engine's rank and table, and the checksum of its bytes. Workers
write it when all of a block's tokens are known and computed, and read it where the page enters a request's table, is
reused elsewhere, has been filled, is copied, or is left by a request that has ended (`engine_kit.kv_canary_worker`).
Results of a step are taken after its checks: a page that does not hold what it should costs its requests what they
computed from it, and they are computed again. A page that was given to somebody else while a request has it ends the
request, because tokens may have come of it.

What the scheduler remembers of a page is the key of the block that its mark names; nothing for one that was given out
and whose block is not full, or not confirmed, yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from engine.interfaces.kv_connector import (
    NO_PAGES,
    Held,
    KVConnectorCard,
    KVConnectorScheduler,
    Pages,
    Transferable,
    Transferred,
)
from engine.plugin import Candidate
from engine.process import wire
from engine.types.errors import ContractError
from engine_kit.kv_blocks import Block, whole_blocks

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine.types.plan import NewBlocks, PageCopies


class CanaryCard(KVConnectorCard):
    """Marks pages with what they hold, and checks it wherever they move."""

    watches = True


class PageList(msgspec.Struct, kw_only=True):
    """Pages and what they hold.

    Args:
        pages: int32 [n]; table, number: int32 [n], of the blocks; number: counted from the request's start.
        keys: of the blocks, one a page.
        why: "found", "reused", "filled", "swapped", "copied" or "ended": what was done with each.
    """

    pages: np.ndarray
    table: np.ndarray
    number: np.ndarray
    keys: list[bytes]
    why: list[str]


class CanarySection(msgspec.Struct, kw_only=True):
    """What one plan has for the worker half.

    Args:
        identity: of the engine, which is part of what marks say.
        stamp: to be marked when the plan begins.
        left: to be checked when it begins, after that: from then on others may write to them.
        held: to be checked when it has run.
        source, destination: int32 [m]; pages that the plan copies: their marks are equal when it has run, where the
            copy's block is not full by then.
    """

    identity: bytes
    stamp: PageList
    left: PageList
    held: PageList
    source: np.ndarray
    destination: np.ndarray


class CanaryNews(msgspec.Struct, kw_only=True):
    """What a rank has found since it last told: int32 [n] pages that do not hold what they should, and counts."""

    failed: np.ndarray
    counts: dict[str, int]


_Entry = tuple[Block, str]


class _Entering(NamedTuple):
    """A request that gets a slot, with these blocks; the plan fills some pages."""

    request_id: str
    blocks: list[Block]
    filled: set[int]
    swapped: bool


class CanaryScheduler(KVConnectorScheduler):
    """See the module. It stores nothing: nothing is ever found in it."""

    def __init__(self, context: CoreContext) -> None:
        self._identity = context.identity
        self._layout = context.layout
        self._marked: dict[int, Block] = {}
        """By page what its mark names."""
        self._own: dict[str, dict[int, bytes]] = {}
        """Of each request that runs: pages of full attention that have to keep their marks, and their keys."""
        self._confirmed: dict[str, set[tuple[int, int]]] = {}
        """Of each request: (table, number) of blocks in marked pages; they go with it when it is swapped."""
        self._stamp: list[_Entry] = []
        self._left: list[_Entry] = []
        self._held: list[_Entry] = []
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        self._entering: list[_Entering] = []
        self._decode = wire.decoder(CanaryNews).decode
        self._counts = Counter(stamped=0, checked=0, mismatches=0, stolen=0)

    # -- what pages hold -----------------------------------------------------------------------------------------------
    def computed(self, request: Transferable, pages: Sequence[Pages], end: int) -> None:
        """Mark the new blocks, and see that nobody else was given the others' pages."""
        for block in whole_blocks(self._layout, request, pages, 0, end):
            self._stamp.append((block, "computed"))
            self._marked[block.page] = block
            self._confirm(request.request_id, block)
        self._check_own(request.request_id)

    def filled(self, request: Transferable, pages: Sequence[Pages]) -> None:
        for block in self._blocks(request, pages):
            self._marked[block.page] = block
            self._left.append((block, "filled"))  # before it may be given up again

    def entered(self, request: Transferable, pages: Sequence[Pages], filled: np.ndarray, swapped: bool) -> None:
        """See `planned`."""
        blocks = list(self._blocks(request, pages))
        self._entering.append(_Entering(request.request_id, blocks, set(filled.tolist()), swapped))

    def reused(self, request: Transferable, blocks: Mapping[bytes, int]) -> None:
        """What is rotated on is what it was found as. A page that has no mark yet is computed by a plan under way."""
        for key, page in blocks.items():
            if (block := self._marked.get(page)) is not None:
                self._held.append((block if block.key == key else block._replace(key=key), "reused"))

    def planned(self, new: Sequence[NewBlocks], copies: PageCopies | None) -> None:
        """Pages that are given out hold nothing yet. What was marked is to be there for those who enter; what the plan
        fills is to bring its mark, where it had one when it left."""
        given = Counter(page for of_table in new for page in of_table.page.tolist())
        given.subtract(block.page for entering in self._entering for block in entering.blocks)
        for page, count in given.items():
            if count > 0:
                self._marked.pop(page, None)
        for entering in self._entering:
            self._enter(*entering)
        self._entering.clear()
        if copies is not None:
            self._copies.append((copies.source, copies.destination))
            self._held += [(self._marked[page], "copied") for page in copies.source.tolist() if page in self._marked]

    def _enter(self, request_id: str, blocks: Sequence[Block], filled: Set[int], swapped: bool) -> None:
        known = self._confirmed.pop(request_id, set())
        self._own[request_id] = {}
        for block in blocks:
            if block.page in filled:
                self._marked.pop(block.page, None)
                if swapped and (block.table.index, block.number) not in known:
                    continue
                self._marked[block.page] = block
            if block.page in self._marked:  # else a plan before this one, or this one, computes it
                why = "found" if block.page not in filled else "swapped" if swapped else "filled"
                self._held.append((block, why))
                self._confirm(request_id, block)

    def _blocks(self, request: Transferable, pages: Sequence[Pages]) -> Iterator[Block]:
        end = max((part.first_block + part.pages.size for part in pages), default=0) * self._layout.block_size
        return iter(whole_blocks(self._layout, request, pages, 0, end))

    def _confirm(self, request_id: str, block: Block) -> None:
        self._confirmed.setdefault(request_id, set()).add((block.table.index, block.number))
        if block.table.window is None:  # else it is given back while the request runs
            self._own.setdefault(request_id, {})[block.page] = block.key

    def _check_own(self, request_id: str) -> None:
        """Raise ContractError where somebody else was given a page of a request that runs."""
        for page, key in self._own.get(request_id, {}).items():
            if page not in self._marked or self._marked[page].key != key:
                self._own.pop(request_id)
                self._counts["stolen"] += 1
                raise ContractError(
                    f"keep the KV pages of request {request_id!r}",
                    f"page {page}, which holds its block {key.hex()}, was given out anew while the request has it",
                    "this is a fault of the engine or its evictor: report it; the request's tokens may be wrong",
                    point="evictor",
                )

    # -- requests end --------------------------------------------------------------------------------------------------
    def finished(self, request: Transferable, pages: Sequence[Pages]) -> Held:
        """Its pages are read once more before anybody else writes to them."""
        own = self._own.get(request.request_id, {})
        for block in self._blocks(request, pages):
            if own.get(block.page) == block.key:
                self._left.append((block, "ended"))
        try:
            self._check_own(request.request_id)
        finally:
            self.aborted(request.request_id)
        return Held()

    def aborted(self, request_id: str) -> None:
        self._own.pop(request_id, None)
        self._confirmed.pop(request_id, None)

    # -- plans and news ------------------------------------------------------------------------------------------------
    def plan_section(self) -> bytes | None:
        stamp, left, held, copies = self._stamp, self._left, self._held, self._copies
        if not (stamp or left or held or copies):
            return None
        self._stamp = []
        self._left = []
        self._held = []
        self._copies = []
        source, destination = zip(*copies, strict=True) if copies else ((NO_PAGES,), (NO_PAGES,))
        return wire.encode(
            CanarySection(
                identity=self._identity,
                stamp=_listed(stamp),
                left=_listed(left),
                held=_listed(held),
                source=np.concatenate(source),
                destination=np.concatenate(destination),
            )
        )

    def take(self, news: Sequence[bytes]) -> Transferred:
        failed = [NO_PAGES]
        for told in map(self._decode, news):
            self._counts.update(told.counts)
            failed.append(told.failed)
        return Transferred(failed=np.unique(np.concatenate(failed)))

    def counts(self) -> Counter[str]:
        """stamped, checked: pages, on all ranks; mismatches: pages that did not hold what they should; stolen: requests
        that were ended because somebody else was given a page of theirs."""
        return self._counts


def _listed(entries: Sequence[_Entry]) -> PageList:
    return PageList(
        pages=np.array([block.page for block, _ in entries], np.int32),
        table=np.array([block.table.index for block, _ in entries], np.int32),
        number=np.array([block.number for block, _ in entries], np.int32),
        keys=[block.key for block, _ in entries],
        why=[why for _, why in entries],
    )


class Canary(NamedTuple):
    """What the core puts together.

    Args:
        candidate, card: whose sections, counts and errors these are.
        core, worker: make both halves of their contexts.
    """

    candidate: Candidate
    card: type[KVConnectorCard]
    core: Callable[[CoreContext], KVConnectorScheduler]
    worker: Callable[[Any], Any]


@cache
def _worker_half() -> Callable[[Any], Any]:
    half: Callable[[Any], Any] = import_module("engine_kit.kv_canary_worker").CanaryWorker
    return half


CANARY = Canary(
    Candidate("kv_connector", "canary", 1, "engine-kit", version("engine-kit"), f"{__name__}:CanaryCard"),
    cast("type[KVConnectorCard]", CanaryCard),
    CanaryScheduler,
    lambda context: _worker_half()(context),
)
