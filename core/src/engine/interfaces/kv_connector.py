"""Point `kv_connector`: keys and values out of the pool, to elsewhere, and back: stores, other engines, a swap tier.

A connector has two halves. The *scheduler half* lives in the engine core, knows requests and page ids, and never sees
a tensor. The *worker half* lives in every worker, on the pool. What the first decides for a step travels in
`StepPlan.sections`, as bytes that nobody else reads, and what the second has to tell comes back as bytes with a step's
result, of each rank; the driver's two halves agree on their form (`engine.process.wire` encodes structs with arrays).

A request's way through it:

    lookup      -> None, or so many tokens more than the device's prefix cache has; or LATER
    allocated   pages stand for what was found: fill them, with this plan (synchronous), or in your own time
    take        what has become of it, of all ranks: `loaded`, and pages that do not hold what they should
    computed    pages hold these tokens: save them if you like, with the next section
    finished    the request has ended well: its pages may stay for another engine that fetches them
    aborted     it has ended otherwise, or what it held was given back after its time

Several connectors may be at work, in the user's order: the first that finds something loads it, all are told what was
computed. Both halves override what they need of the classes below; the other methods do nothing.

Minor version 1 added `watches`, with `filled`, `entered` and `planned`; 2 `moves_marks`; 3 `reused`; 4 `PagedPool`,
which a card without a `framework` takes as well as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from engine.plugin import Card
from engine.types.parallel import Parallel

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext, WorkerContext
    from engine.types.plan import NewBlocks, PageCopies

NO_PAGES = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class KVConnectorNeed:
    """What the engine asks of a connector.

    Args:
        page_bytes: bytes of one page on one rank.
        swap_space: bytes of host memory that each rank may take for swapped pages; 0: none are swapped.
        parallel: the workers; each has its own pool, and its own worker half.
        device: torch's device string, of the pool.
        framework: "torch" or "jax".
        prefix_caching: what is loaded can enter the prefix cache.
    """

    page_bytes: int
    swap_space: int
    parallel: Parallel
    device: str
    framework: str = "torch"
    prefix_caching: bool = True


class KVConnectorCard(Card):
    """Describes a connector. `bodies` names both halves: {"core": "pkg.mod:Class", "worker": "pkg.mod:Class"}."""

    stores: ClassVar[bool] = True
    """Whether it is asked and told about the blocks of requests: `lookup` to `aborted`."""
    swaps: ClassVar[bool] = False
    """Whether it keeps the pages of preempted requests: `swap_out`, `swap_in`, `forget` and `usage`."""
    watches: ClassVar[bool] = False
    """Whether the scheduler half is told what becomes of all pages: `filled`, `entered` and `planned`."""
    layerwise: ClassVar[bool] = False
    """Whether the worker half is called before and after each layer, and the scheduler half told of pages that a plan
    is going to compute (`allocated`)."""
    moves_marks: ClassVar[bool] = False
    """Of one that is `layerwise`: whether it moves a page's last `KVLayout.mark_bytes`, too, and all that lies between
    these and the last layer. They are written after the layers, before `begin` of the step after `computed`."""

    @classmethod
    def mismatches(cls, need: KVConnectorNeed) -> list[str]:
        """The framework's, and where the engine has no use for what the connector does."""
        reasons = super().mismatches(need)
        if need.framework != KVConnectorNeed.framework and not reasons and (cls.layerwise or cls.requires_minor < 4):
            reasons.append("the platform's worker keeps no tensor of torch's, and moves whole pages alone (minor 4)")
        if not (cls.stores or need.swap_space):
            reasons.append("it keeps the pages of preempted requests, and there is no swap space (--swap-space)")
        if not (cls.swaps or need.prefix_caching):
            reasons.append("what it loads has to enter the prefix cache, which this engine or its model does without")
        return reasons


class Pages(NamedTuple):
    """Pages of one request in one KV table.

    Args:
        table: the table's index, see `engine.types.kv.KVLayout`.
        first_block: pages[i] holds block first_block + i of the request, `block_size` tokens.
        pages: int32 [n]. Of a sliding window's table, those alone that are still seen.
    """

    table: int
    first_block: int
    pages: np.ndarray


class Found(NamedTuple):
    """What a connector has of a request.

    Args:
        num_tokens: beyond those that the device has: whole blocks, at least one. Of more than `num_loadable` in all,
            the core takes fewer, or nothing where a KV table has a window.
        asynchronous: they arrive in the connector's own time (another engine, a disk), and the request waits for them
            without a slot. False: the worker half fills the pages with the plan that computes the rest.
    """

    num_tokens: int
    asynchronous: bool = False


LATER = Found(-1)
"""Not known yet: the request waits, others go on, and it is asked again, until it is computed."""
LOOKUP_SECONDS = 10.0
"""How long it is asked again; also where its load finds no room beside others'. The driver's option `lookup_seconds`,
where it has one, goes before."""


class Held(NamedTuple):
    """What becomes of a request that has ended.

    Args:
        params: for whoever sent the request: `CoreOutput.kv_transfer`, `kv_transfer_params` over HTTP.
        seconds: its pages stay so long, until `Transferred.sent` names it; 0: they are not needed.
    """

    params: dict[str, Any] | None = None
    seconds: float = 0.0


class Transferred(NamedTuple):
    """What has happened since the last time, on all ranks.

    Args:
        loaded: ids of requests whose asynchronous load has ended, well or not, or that were aborted meanwhile: nobody
            writes into their pages any more. Each once, when the last rank is done.
        sent: ids of requests whose held pages nobody reads any more; none that were `aborted`.
        failed: int32 [m]; pages that do not hold what they should, on any rank. The requests that have them are
            computed again; nobody else finds them. Those of a synchronous load come with that step's news.
    """

    loaded: Sequence[str] = ()
    sent: Sequence[str] = ()
    failed: np.ndarray = NO_PAGES


class SwapUsage(NamedTuple):
    """How full a swap tier is, in pages of one rank.

    Args:
        used: that hold something.
        total: that there are.
    """

    used: int
    total: int


class Transferable(Protocol):
    """A request, as connectors see it.

    Attributes:
        request_id: unique among unfinished requests, and those whose pages are held: one of these is `aborted` when
            another of its name comes.
        token_ids: int32 [n]; the prompt, and what else was known when it last waited for a slot.
        num_prompt_tokens: of the prompt.
        num_loadable: tokens, in whole blocks from the first, that need not be computed; since `lookup`.
        kv_transfer: what came with the request, see `EngineRequest.kv_transfer`.
    """

    request_id: str
    token_ids: np.ndarray
    num_prompt_tokens: int
    num_loadable: int
    kv_transfer: dict[str, Any] | None

    def block_keys(self, table: int) -> list[bytes]:
        """The key of each whole block known so far in one KV table: it covers the block's tokens, all before them, and
        salt and adapter. A store that outlives the engine puts `CoreContext.identity` and the worker's place before."""


class KVConnectorScheduler:
    """The scheduler half. Built with a `CoreContext`, once the number of pages is known. One thread calls it, and waits
    for it: no method may wait for anything. What a method with a request raises is logged and counted, and ends that
    request if it has not ended; what others raise ends the engine."""

    def __init__(self, context: CoreContext) -> None: ...

    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        """What there is of the request beyond its first `num_local` tokens, whole blocks that the device has. Asked
        when it is about to be admitted, perhaps several times; None for nothing."""
        return None

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        """These pages stand for its tokens first .. end - 1, and hold nothing yet: fill them, if you found them. With a
        `layerwise` card also those that the plan being made computes, the last block perhaps in part."""

    def computed(self, request: Transferable, pages: Sequence[Pages], end: int) -> None:
        """The device holds its first `end` tokens, whole blocks; `pages`: those of which this was not told yet, to be
        read in `begin` of the next section's step at the latest, unless the request is held."""

    def finished(self, request: Transferable, pages: Sequence[Pages]) -> Held:
        """It has ended well; pages of all its blocks, also the last, partly filled one. None where it had none."""
        return Held()

    def aborted(self, request_id: str) -> None:
        """A request has ended otherwise, perhaps one that was never looked up, or its hold has run out: by the end of
        the next section's `begin` no rank may read or write its pages any more, but for an asynchronous load, which
        `take` is still to tell the end of."""

    def filled(self, request: Transferable, pages: Sequence[Pages]) -> None:
        """Asynchronous loads have filled these pages, whole blocks; NULL_PAGE in place of those that failed."""

    def entered(self, request: Transferable, pages: Sequence[Pages], filled: np.ndarray, swapped: bool) -> None:
        """The plan being made gives the request a slot with these pages of whole blocks. filled: int32 [n], those that
        the plan fills, among them; swapped: with what the request has left."""

    def reused(self, request: Transferable, blocks: Mapping[bytes, int]) -> None:
        """The request, which the plan being made gives a slot, reads blocks that are not its own
        (`engine.interfaces.evictor.Reuse`), of the only table: by key the page that holds it; NULL_PAGE: not read."""

    def planned(self, new: Sequence[NewBlocks], copies: PageCopies | None) -> None:
        """What else the plan does with pages, after `entered` for all who enter."""

    def plan_section(self) -> bytes | None:
        """Everything that was decided since the last call, for the worker half. None where there is nothing to do.
        Asked when a plan is made after any of the other calls, and while loads or holds are open: a worker half
        without a section then hears None, so that its news come."""
        return None

    def take(self, news: Sequence[bytes]) -> Transferred:
        """What worker halves have to tell, of any of the ranks, in the order of steps."""
        return Transferred()

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        """Keep what these pages, int32 [n], hold when the next plan begins, in this order, under the request's id.

        False where there is no room for all of them: then nothing is kept.
        """
        return False

    def swap_in(self, request_id: str, places: np.ndarray, pages: np.ndarray) -> None:
        """With the next plan, fill page pages[i] with what the places[i]-th of the request's kept pages held.

        Everything kept for the request is forgotten after that.

        places: int32 [m], ascending, each below the number that was swapped out; pages: int32 [m].
        """

    def forget(self, request_id: str) -> None:
        """The request has ended: its kept pages are wanted no more. So they are where its `swap_out` raised, whatever
        it has kept by then; what this call raises then is passed over."""

    def usage(self) -> SwapUsage:
        """How full the swap tier is. Cheap: asked for after each step."""
        return SwapUsage(0, 0)

    def counts(self) -> Mapping[str, int]:
        """What operators may want to watch, by its name, since start. Cheap: asked for after each step."""
        return {}

    def check_integrity(self) -> None:
        """Raise AssertionError where the inner state contradicts itself. For tests and idle moments."""

    def close(self) -> None:
        """Let go of threads, sockets and files. Idempotent."""


@runtime_checkable
class PagedPool(Protocol):
    """The pool where the platform's framework is not torch. For the thread of `begin` and `load` alone."""

    page_bytes: int

    def read(self, pages: np.ndarray) -> Callable[[], np.ndarray]:
        """What pages, int32 [n], hold behind all that is queued: uint8 [n, page_bytes], for any thread that waits."""

    def write(self, pages: np.ndarray, content: np.ndarray) -> None:
        """Fill them behind all that is queued, with a copy of uint8 [n, page_bytes]."""


class KVConnectorWorker:
    """The worker half, one on each rank. Built with a `WorkerContext`, after everything else: `context.start` says how
    pages are cut (`layout`, with the `page_format` of each group), and where this rank stands (`place`).

    A step calls `begin` of all connectors that have a section, then `load` of all of them, then computes, then calls
    `end`. `news` comes with the step's result.
    """

    def __init__(self, context: WorkerContext) -> None: ...

    def register(self, pool: Any) -> None:
        """The KV pool, of all KV tables: a torch.Tensor, uint8 [num_pages, page_bytes], or a `PagedPool`. Called once,
        before the first step.

        Raises an EngineError where memory of the connector's own cannot be had.
        """

    def begin(self, step_id: int, section: bytes | None) -> None:
        """Read pages that leave the pool, in order with the device's work: what comes after this overwrites them.

        section: of the scheduler half; None: it has none for this step, and wants news. Steps may be without rows.
        """

    def load(self, step_id: int) -> None:
        """Fill pages, in order with the device's work: what comes after this reads them, but for asynchronous loads,
        which begin here. A page that cannot be filled is told with the step's news."""

    def before_layer(self, site: int) -> None:
        """The layer of this site (a place in `WorkerStart.sites`) reads next: its part of the pages has to be there.
        Called for the model's sites on this stage in order, where the card is `layerwise`; a draft model's part has to
        be there when `load` returns."""

    def after_layer(self, site: int) -> None:
        """The layer's keys and values of this step are stored, in order with the device's work."""

    def end(self, step_id: int) -> None:
        """Everything that the step computes is queued, and nothing that comes after it."""

    def news(self) -> bytes | None:
        """What the scheduler half is to know, since the last call; None for nothing. Never waits. Called when a step's
        result is taken, after `end` of that step, perhaps after `begin` of the next."""
        return None

    def close(self) -> None:
        """Let go of threads, sockets and files; the pool goes next. Idempotent."""
