"""One rank as a process: `python -m engine_reference.executor_process.rank`.

One thread does everything: a finished step is told first, then the next order is taken, so that on a device with a
queue the next step is launched while the last one runs.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from engine.plugin.loading import import_object
from engine.process import wire
from engine.process.run import run
from engine.process.wire import Parent
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Shutdown
from engine.types.plan import StepPlan
from engine_kit.logs import log_as
from engine_kit.ranks import RankAnswer, call_worker
from engine_reference.executor_process.messages import (
    Answer,
    Done,
    Meet,
    Order,
    RankCall,
    RankFailed,
    RankMeets,
    RankReady,
    RankStart,
    Sample,
    Step,
)

if TYPE_CHECKING:
    from engine.interfaces.executor import StepFuture, Worker

log = logging.getLogger("engine.executor")

POLL_SECONDS = 0.0001


def main(start: RankStart, parent: Parent[Order]) -> int:
    """Run until told to stop. Returns the exit code."""
    log_as(start.message.log_format)
    message = msgspec.structs.replace(start.message, rendezvous=start.message.rendezvous or parent.directory)
    return Rank(RankStart(start.worker, message), parent).run()


class Rank:
    """The worker, and the parent that drives it."""

    def __init__(self, start: RankStart, parent: Parent[Order]) -> None:
        self._start = start
        self._rank = start.message.place.rank
        self._parent = parent
        self._tell = parent.send
        self._store: object = None
        self._under_way: deque[tuple[StepPlan, StepFuture]] = deque()

    def run(self) -> int:
        """Start the worker and serve it; the exit code."""
        try:
            worker = self._start_worker()
        except Exception as error:
            self._failed(error, "start")
            return 1
        try:
            while not isinstance(order := self._next_order(), Shutdown):
                if isinstance(order, Step):
                    self._launch(worker, order.plan)
                elif isinstance(order, Sample):
                    self._sample(worker, order)
                elif isinstance(order, RankCall):
                    self._tell(self._answer(worker, order))
            worker.shutdown()
        except Exception as error:
            self._failed(error, "run")
            return 1
        return 0

    def _start_worker(self) -> Worker:
        message = self._start.message
        if len({seat.node for seat in message.seats}) > 1:
            message = msgspec.structs.replace(message, store=self._meet(message.seat.address))
        worker: Worker = import_object(self._start.worker)(message)
        self._tell(RankReady(self._rank, worker.start()))
        return worker

    def _meet(self, here: str) -> str:
        """Where the ranks of several machines meet. The first one has the store, which hears at its machine's address
        alone; the others are told where."""
        if self._rank == 0:
            import torch.distributed

            dist: Any = torch.distributed  # its stubs do not know the store's socket
            listener = socket.create_server((here, 0), backlog=1024)
            store = "{}:{}".format(*listener.getsockname())
            self._tell(RankMeets(0, store))
            server = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
            self._store = dist.TCPStore(here, int(store.rpartition(":")[2]), use_libuv=False, **server)
        while not isinstance(order := self._next_order(), Meet):
            if isinstance(order, Shutdown):
                raise EngineDeadError("meet the other ranks", "it was told to stop before they had met")
        return order.store

    def _launch(self, worker: Worker, plan: StepPlan) -> None:
        try:
            self._under_way.append((plan, worker.execute(plan)))
        except Exception as error:
            self._failed(error, f"compute step {plan.step_id}")

    def _sample(self, worker: Worker, order: Sample) -> None:
        try:
            worker.sample(order.step_id, order.masks)
        except Exception as error:
            self._failed(error, f"sample step {order.step_id}")

    def _next_order(self) -> Order:
        """Tell what is done until an order comes."""
        while self._under_way:
            if self._under_way[0][1].done():
                self._finish(*self._under_way.popleft())
            elif self._parent.inbox.wait(0):
                break
            else:
                time.sleep(POLL_SECONDS)
        while (order := self._parent.receive()) is None:
            pass
        return order

    def _finish(self, plan: StepPlan, future: StepFuture) -> None:
        try:
            self._tell(Done(self._rank, RankAnswer.of(self._start.message.place, future.result())))
        except Exception as error:
            self._failed(error, f"compute step {plan.step_id}")

    def _answer(self, worker: Worker, call: RankCall) -> Answer:
        try:
            answer = Answer(self._rank, call.call_id, call_worker(worker, call.method, call.args))
            wire.encode(answer)  # what cannot travel is the call's error, not the process's
            return answer
        except EngineError as error:
            return Answer(self._rank, call.call_id, error=error.parts)
        except Exception as error:
            parts = EngineError(f"call {call.method} of rank {self._rank}", f"{type(error).__name__}: {error}").parts
            return Answer(self._rank, call.call_id, error=parts)

    def _failed(self, error: Exception, what: str) -> None:
        """Tell, and wait to be ended: nothing can be computed any more."""
        if isinstance(error, EngineError):
            return self._tell(RankFailed(self._rank, error.parts, typed=True))
        log.error("%s failed", what, exc_info=error)
        size = self._start.message.parallel.world
        dead = EngineDeadError(f"{what} on rank {self._rank} of {size}", f"{type(error).__name__}: {error}")
        self._tell(RankFailed(self._rank, dead.parts, typed=False))


if __name__ == "__main__":
    run("a rank", RankStart, Order, main)
