"""A core and its ranks around a connector's two halves, with a copy of everything that is swapped.

Decisions and copies are apart as they are in the engine: plans are made, and run later, each in its turn, and results
are taken later still. What a request's pages hold is known when the plan runs that takes them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.interfaces.kv_connector import KVConnectorScheduler, KVConnectorWorker, Transferred


@dataclass
class Kept:
    """What one request left.

    Args:
        pages: int32 [n], as they were given.
        content: uint8 [n, page_bytes] on each rank, from the plan on that takes them out.
        lost: loads of it have to fail.
    """

    pages: np.ndarray
    content: list[np.ndarray] = field(default_factory=list)
    lost: bool = False


@dataclass
class Plan:
    """What was decided for one step.

    Args:
        step_id: its number.
        section: of the scheduler half.
        out: what is taken out; without those that were given up before the plan was made.
        into: whose places go into which pages.
    """

    step_id: int
    section: bytes | None
    out: list[Kept]
    into: list[tuple[Kept, np.ndarray, np.ndarray]]


class Tier:
    """See the module.

    Args:
        core: the scheduler half.
        workers: the worker halves, registered with `pools`.
        pools: uint8 [num_pages, page_bytes], one on each rank.
    """

    def __init__(
        self, core: KVConnectorScheduler, workers: Sequence[KVConnectorWorker], pools: Sequence[torch.Tensor]
    ) -> None:
        self.core = core
        self.workers = workers
        self.pools = pools
        self.kept: dict[str, Kept] = {}
        self.freed = 0
        """Pages that were given up since the last plan: their places may not be free yet."""
        self._out: list[Kept] = []
        self._into: list[tuple[Kept, np.ndarray, np.ndarray]] = []
        self._plans: deque[Plan] = deque()
        self._running: deque[Plan] = deque()
        self._untold: set[int] = set()  # pages that could not be filled
        self._steps = 0
        self._random = np.random.default_rng(0)

    @property
    def used(self) -> int:
        """Pages of requests that are kept."""
        return sum(kept.pages.size for kept in self.kept.values())

    # -- what the core decides ---------------------------------------------------------------------------------------
    def swap_out(self, request_id: str, pages: Sequence[int]) -> bool:
        """Keep these; a refusal has to have a reason."""
        given = np.array(pages, np.int32)
        before = self.core.usage()
        taken = self.core.swap_out(request_id, given.copy())
        assert isinstance(taken, bool), f"swap_out answers {taken!r}"
        total = before.total
        if not taken:
            assert len(pages) + self.used + self.freed > total, (
                f"{len(pages)} pages are refused, with {self.used} of {total} in use"
            )
            assert self.core.usage() == before, "pages were refused, and some are kept"
            return False
        assert len(pages) + self.used <= total, f"{self.used + len(pages)} pages are kept, in room for {total}"
        kept = self.kept[request_id] = Kept(given)
        self._out.append(kept)
        return True

    def swap_in(self, request_id: str, places: Sequence[int], pages: Sequence[int]) -> None:
        """Bring some back, and forget the rest."""
        kept = self.kept.pop(request_id)
        self.freed += kept.pages.size
        self._into.append((kept, np.array(places, np.int32), np.array(pages, np.int32)))
        self.core.swap_in(request_id, np.array(places, np.int32), np.array(pages, np.int32))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        kept = self.kept.pop(request_id)
        self.freed += kept.pages.size
        self._out = [other for other in self._out if other is not kept]
        self.core.forget(request_id)

    @property
    def targets(self) -> set[int]:
        """Pages that the next plan fills."""
        return {page for _, _, pages in self._into for page in pages.tolist()}

    def plan(self) -> Plan:
        """Make the next plan."""
        section = self.core.plan_section()
        assert section is None or isinstance(section, bytes), f"plan_section answers {type(section).__name__}"
        if section is None:
            assert not self._out and not any(pages.size for _, _, pages in self._into), "a plan without its copies"
        made = Plan(self._steps, section, self._out, self._into)
        self._out = []
        self._into = []
        self.freed = 0
        self._steps += 1
        self._plans.append(made)
        usage = self.core.usage()
        assert usage.used == self.used, f"{usage.used} pages are said to be used, {self.used} are"
        self.core.check_integrity()
        return made

    # -- what the ranks do -------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run the oldest plan, and compare every page of every rank; then the step computes, which changes pages."""
        plan = self._plans.popleft()
        self._running.append(plan)
        self._untold |= {page for kept, _, pages in plan.into if kept.lost for page in pages.tolist()}
        for kept in plan.out:
            kept.content = [pool[kept.pages].cpu().numpy().copy() for pool in self.pools]
        for rank, (worker, pool) in enumerate(zip(self.workers, self.pools, strict=True)):
            expected = pool.cpu().numpy().copy()
            unknown = np.zeros(len(expected), bool)
            for kept, places, pages in plan.into:
                expected[pages] = kept.content[rank][places] if places.size else expected[pages]
                unknown[pages] |= kept.lost
            if plan.section is not None:
                worker.begin(plan.step_id, plan.section)
                worker.load(plan.step_id)
                worker.end(plan.step_id)
            wrong = (pool.cpu().numpy() != expected).any(axis=1) & ~unknown
            filled = {page for _, _, pages in plan.into for page in pages.tolist()}
            for page in np.flatnonzero(wrong).tolist():
                what = "holds other bytes than were kept" if page in filled else "was changed, and nobody asked for it"
                raise AssertionError(f"page {page} of rank {rank} {what}")
            self.scribble(pool)

    def lost(self) -> None:
        """All that plans have taken out by now can be read no more."""
        on_its_way = [kept for into in (self._into, *(plan.into for plan in self._plans)) for kept, _, _ in into]
        for kept in (*self.kept.values(), *on_its_way):
            kept.lost = kept.lost or bool(kept.content)

    def take(self) -> None:
        """Take the oldest step's result: the pages that could not be filled up to now, and no others."""
        plan = self._running.popleft()
        news = [] if plan.section is None else [worker.news() for worker in self.workers]
        assert all(told is None or isinstance(told, bytes) for told in news), f"news are {news!r:.200}"
        told = self.core.take([one for one in news if one is not None]) if any(news) else Transferred()
        assert not told.loaded and not told.sent, f"nobody asked for {told}"
        failed = told.failed
        assert isinstance(failed, np.ndarray) and failed.dtype == np.int32, "failed pages are no int32 array"
        assert sorted(failed.tolist()) == sorted(self._untold), (
            f"after step {plan.step_id} pages {failed.tolist()} could not be filled; {sorted(self._untold)} could not"
        )
        if plan.section is not None:
            self._untold.clear()

    @property
    def planned(self) -> int:
        """Plans that were made and not run."""
        return len(self._plans)

    @property
    def running(self) -> int:
        """Plans that ran, and whose results were not taken."""
        return len(self._running)

    def step(self) -> None:
        """Plan, run, take."""
        self.plan()
        self.run()
        self.take()

    def drain(self) -> None:
        """Everything that is on its way."""
        while self._plans:
            self.run()
        while self._running:
            self.take()

    def scribble(self, pool: torch.Tensor) -> None:
        """Other bytes in every page."""
        pool.copy_(torch.from_numpy(self._random.integers(0, 256, tuple(pool.shape), np.uint8)))
