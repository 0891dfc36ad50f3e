"""Point `kv_connector`: takes KV pages out of the pool, to elsewhere, and brings them back.

A connector has two halves. The *scheduler half* lives in the engine core, knows requests and page ids, and never sees
a tensor. The *worker half* lives in every worker, on the pool. What the first decides for a step travels in
`StepPlan.sections`, as bytes that nobody else reads; the driver's two halves agree on their form
(`engine.process.wire` encodes structs with arrays).

Today the core uses connectors as a swap tier: a request that is preempted leaves its pages' content there and
takes it back when it goes on. Workers run plans in order, so a page that is swapped out by plan N may be overwritten by
that same plan, and one that is swapped in by plan N is read by that same plan: `save` comes before `start_load`, and
both before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from engine.plugin import Card
from engine.types.parallel import Parallel

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.interfaces.context import CoreContext, WorkerContext


@dataclass(frozen=True, kw_only=True)
class KVConnectorNeed:
    """What the engine asks of a connector.

    Args:
        page_bytes: bytes of one page on one rank.
        swap_space: bytes of host memory that each rank may take for swapped pages; 0: none are swapped.
        parallel: the workers; each has its own pool, and its own worker half.
        device: torch's device string, of the pool.
        framework: "torch" or "jax".
    """

    page_bytes: int
    swap_space: int
    parallel: Parallel
    device: str
    framework: str = "torch"


class KVConnectorCard(Card):
    """Describes a connector. `bodies` names both halves: {"core": "pkg.mod:Class", "worker": "pkg.mod:Class"}."""

    swaps: ClassVar[bool] = False
    """Whether it keeps the pages of preempted requests: the scheduler half's `swap_out`, `swap_in` and `forget`."""

    @classmethod
    def mismatches(cls, need: KVConnectorNeed) -> list[str]:
        """The framework's, and where pages are to be swapped that the connector does not keep them."""
        keeps = cls.swaps or not need.swap_space
        return super().mismatches(need) + ([] if keeps else ["it does not keep the pages of preempted requests"])


class SwapUsage(NamedTuple):
    """How full a swap tier is, in pages of one rank.

    Args:
        used: that hold something.
        total: that there are.
    """

    used: int
    total: int


class KVConnectorScheduler(Protocol):
    """The scheduler half. Built with a `CoreContext`, once the number of pages is known. One thread calls it.

    All page ids are int32 numpy arrays.
    """

    def __init__(self, context: CoreContext) -> None: ...

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        """Keep what these pages hold when the next plan begins, in this order, under the request's id.

        False where there is no room for all of them: then nothing is kept.
        """
        ...

    def swap_in(self, request_id: str, places: np.ndarray, pages: np.ndarray) -> None:
        """When the next plan begins, fill page pages[i] with what the places[i]-th of the request's kept pages held.

        Everything kept for the request is forgotten after that.

        places: int32 [m], ascending, each below the number that was swapped out; pages: int32 [m].
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended: its kept pages are wanted no more."""
        ...

    def plan_metadata(self) -> bytes | None:
        """Everything that was decided since the last call, for the worker half. Called once a plan, when it is made;
        None where there is nothing to do."""
        ...

    def usage(self) -> SwapUsage:
        """How full it is. Cheap: asked for after each step."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError where the inner state contradicts itself. For tests and idle moments."""
        ...


class KVTransferResult(NamedTuple):
    """What became of one step's transfers on one rank.

    Args:
        failed_pages: int32 [m]; pages that `start_load` could not fill. The core takes the tokens of requests that
            read them back, and computes those requests again.
    """

    failed_pages: np.ndarray


class KVConnectorWorker(Protocol):
    """The worker half, one on each rank. Built with a `WorkerContext`, after everything else."""

    def __init__(self, context: WorkerContext) -> None: ...

    def register(self, pool: torch.Tensor) -> None:
        """The KV pool: uint8 [num_pages, page_bytes], of all KV tables. Called once, before the first step.

        Raises an EngineError where memory of the connector's own cannot be had.
        """
        ...

    def save(self, metadata: bytes) -> None:
        """Take pages out, in order with the device's work: they may be overwritten by what is queued after this."""
        ...

    def start_load(self, step_id: int, metadata: bytes) -> None:
        """Bring pages in, in order with the device's work: what is queued after this reads them."""
        ...

    def step_result(self, step_id: int) -> KVTransferResult:
        """What became of the loads of this step, whose result is being taken. Called once for each `start_load`."""
        ...
