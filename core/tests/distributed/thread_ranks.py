"""Ranks as threads of the test's process, with the real workers and real communicators: no process starts.

`ThreadExecutor` holds every rank to the same answer.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np

from engine.interfaces.communicator import Communicator, CommunicatorNeed
from engine.interfaces.context import CoreContext
from engine.interfaces.executor import ExecutorCard, ExecutorNeed, rank_starts
from engine.plugin import Candidate, Registry
from engine.plugin.loading import load_body
from engine.types.parallel import GroupPlace, Place
from engine.types.plan import Masks, StepPlan, StepResult
from engine.types.start import WorkerReady, WorkerStart
from engine_kit.ranks import RankAnswer, StepMerge, call_worker, merge_ready

SECONDS = 60
"""A rank that fails leaves the others waiting: they are daemons, and the test fails."""

THREADS = Candidate("executor", "threads", 0, "harness", "1", "thread_ranks:ThreadsCard")


def registry() -> Registry:
    return Registry.discover(extra=(THREADS,))


def communicators() -> dict[str, type]:
    """The body of every installed communicator that serves ranks on this machine's processor, by name.

    The tests of the reference driver hold for each of them.
    """
    found, bodies = Registry.discover(), {}
    for candidate in found.candidates("communicator"):
        card = found.card(candidate)
        if not card.unsupported(CommunicatorNeed(world_size=2, device="cpu")):
            bodies[candidate.name] = load_body(card, candidate=candidate)
    return bodies


def on_ranks(driver: type, size: int, work: Callable[[int, Communicator], Any]) -> list[Any]:
    """work(rank, communicator) on every rank at once, with a driver's body; the answers by rank."""
    folder = tempfile.mkdtemp(prefix="thread-ranks-")
    futures: list[Future[Any]] = [Future() for _ in range(size)]
    done = threading.Event()

    def run(rank: int) -> None:
        try:
            members = tuple(range(size))
            group = GroupPlace(name="tp", rank=rank, size=size, members=members, rendezvous=folder)
            communicator = driver(SimpleNamespace(group=group))
            futures[rank].set_result(work(rank, communicator))
            done.wait(SECONDS)  # one that has left is an error for those at work
            communicator.close()
        except BaseException as error:
            futures[rank].set_exception(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        return [future.result(SECONDS) for future in futures]
    finally:
        done.set()
        for thread in threads:
            thread.join(5)  # a communicator that closes while the interpreter ends would abort it
        shutil.rmtree(folder)


@dataclass
class MergedStep:
    """Done when every rank is. Implements `StepFuture`."""

    step_id: int
    places: list[Place]
    futures: list[Future[StepResult]]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def result(self, timeout: float | None = None) -> StepResult:
        results = [future.result(timeout or SECONDS) for future in self.futures]
        merge = StepMerge(self.step_id, range(len(results)))
        for place, result in zip(self.places, results, strict=True):
            merge.take(place.rank, RankAnswer.of(place, result))
        first, *others = [result for place, result in zip(self.places, results, strict=True) if place.draws]
        for other in others:
            assert (other.logprobs is None) == (first.logprobs is None)
            if first.logprobs is not None:
                np.testing.assert_array_equal(other.logprobs.chosen, first.logprobs.chosen)
                np.testing.assert_array_equal(other.logprobs.top_ids, first.logprobs.top_ids)
        return merge.result()


class ThreadsCard(ExecutorCard):
    body = "thread_ranks:ThreadExecutor"
    priority = -100

    @classmethod
    def unsupported(cls, need: ExecutorNeed) -> list[str]:
        return []


class ThreadExecutor:
    """A thread a rank, each with its queue of work."""

    started: ClassVar[weakref.WeakSet[ThreadExecutor]] = weakref.WeakSet()

    def __init__(self, context: CoreContext) -> None:
        self._worker_class = context.worker
        self._last: MergedStep | None = None
        self.overlaps = 0
        """Steps that were sent before the last one's tokens were known: placeholders, fed forward on each rank."""

    def start(self, message: WorkerStart) -> WorkerReady:
        self._folder = tempfile.mkdtemp(prefix="thread-ranks-")
        weakref.finalize(self, shutil.rmtree, self._folder, True)
        self.started.add(self)
        starts = rank_starts(msgspec.structs.replace(message, rendezvous=self._folder))
        self._places = [start.place for start in starts]
        self.workers = [self.make(start) for start in starts]
        self._threads = [ThreadPoolExecutor(1) for _ in starts]
        return merge_ready(self.call("start"))

    def make(self, start: WorkerStart) -> Any:
        """The worker of a rank."""
        module, _, name = self._worker_class.partition(":")
        return getattr(importlib.import_module(module), name)(start, registry())

    def execute(self, plan: StepPlan) -> MergedStep:
        def run(worker: Any) -> StepResult:
            result: StepResult = worker.execute(plan).result()
            return result

        self.overlaps += self._last is not None and not self._last.done()
        if plan.masks_follow:
            self._open = [t.submit(w.execute, plan) for t, w in zip(self._threads, self.workers, strict=True)]
            self._last = MergedStep(plan.step_id, self._places, [Future() for _ in self.workers])
            return self._last
        futures = [t.submit(run, worker) for t, worker in zip(self._threads, self.workers, strict=True)]
        self._last = MergedStep(plan.step_id, self._places, futures)
        return self._last

    def sample(self, step_id: int, masks: Masks) -> None:
        def run(worker: Any, launched: Future[Any], future: Future[StepResult]) -> None:
            try:
                worker.sample(step_id, masks)
                future.set_result(launched.result().result())
            except BaseException as error:
                future.set_exception(error)

        assert self._last is not None
        for thread, *rank in zip(self._threads, self.workers, self._open, self._last.futures, strict=True):
            thread.submit(run, *rank)

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        futures = [
            thread.submit(call_worker, worker, method, args)
            for place, (thread, worker) in enumerate(zip(self._threads, self.workers, strict=True))
            if rank in (None, place)
        ]
        return [future.result(SECONDS) for future in futures]

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.started.discard(self)
        for thread in self._threads:
            thread.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
