"""The processes of all ranks: start them, speak to them, see who has died, end them without a trace."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

import msgspec

from engine.interfaces.nodes import Nodes
from engine.process import wire
from engine.process.child import Child, Elsewhere
from engine.process.local import NodeProcess
from engine.process.wire import wait_for_any
from engine.types.start import WorkerStart
from engine_reference.executor_process.messages import News, Order, RankFailed, RankStart

MODULE = "engine_reference.executor_process.rank"


class Ranks:
    """One process a rank, on this machine or, where ranks have seats, on theirs. Communicators meet in the directory of
    the first on a machine; those of several machines in a store that the first rank has.

    Args:
        worker: "pkg.mod:Class" to start.
        starts: of each rank.
        nodes: starts them where they have seats.

    Raises EngineDeadError where one cannot be started.
    """

    def __init__(self, worker: str, starts: Sequence[WorkerStart], nodes: Nodes | None = None) -> None:
        self.size = len(starts)
        self._owner = os.getpid()
        self._closed = False
        self._children: list[Child[News]] = []
        self._failed: set[int] = set()  # those of whom that was told
        try:
            meeting: dict[str, str] = {}  # directory of the first rank of each machine
            for start in starts:
                node = start.seat.node
                start = msgspec.structs.replace(start, rendezvous=meeting.get(node, ""))
                self._children.append(self._start(worker, start, nodes))
                meeting.setdefault(node, self._children[-1].directory)
        except BaseException:
            self.close(0)
            raise

    def _start(self, worker: str, start: WorkerStart, nodes: Nodes | None) -> Child[News]:
        place, seat, elsewhere = start.place, start.seat, None
        if start.seats and nodes is not None:
            name = f"core{start.data_parallel_rank}:rank{place.rank} stage{place.stage.index} tp{place.tp_rank}"

            def spawn(module: str, data: bytes, what: str) -> NodeProcess:
                return nodes.spawn(seat.node, module, data, name, devices=1)

            elsewhere = Elsewhere(spawn, nodes.here, seat.address, nodes.timeout)
        message = RankStart(worker, start)
        return Child(MODULE, message, News, what=f"rank {place.rank}", home=start.home, elsewhere=elsewhere)

    @property
    def directory(self) -> str:
        """Where communicators of the first rank's machine meet."""
        return self._children[0].directory

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [child.pid for child in self._children]

    def send(self, order: Order, ranks: Iterable[int] | None = None) -> None:
        """Queue an order for these ranks, None: every one, encoded once; never blocks. A dead rank swallows it."""
        data = wire.encode(order)
        for child in self._children if ranks is None else [self._children[rank] for rank in ranks]:
            child.send_encoded(data)

    def receive(self, seconds: float) -> News | None:
        """The next message, waited for so long; None where none comes. What cannot be read is told as a failure."""
        if (news := self._next()) is None and seconds:
            wait_for_any([child.inbox for child in self._children], seconds)
            news = self._next()
        return news

    def _next(self) -> News | None:
        for rank, child in enumerate(self._children):
            if (news := child.take()) is not None:
                return news
            if child.failed and rank not in self._failed:
                self._failed.add(rank)
                return RankFailed(rank, child.death().parts, typed=True)
        return None

    def dead(self) -> list[int]:
        """The ranks whose process has ended, or that are not reached any more."""
        return [rank for rank, child in enumerate(self._children) if not child.alive or child.cut]

    def stopped(self) -> list[int]:
        """The ranks that the system has stopped."""
        return [rank for rank, child in enumerate(self._children) if child.stopped]

    def describe(self, rank: int) -> str:
        """A rank with its process and the state of that, for people."""
        return f"rank {rank} of {self.size} ({self._children[rank].describe()})"

    def close(self, grace: float = 3.0) -> None:
        """End every process, with so many seconds to leave by itself; remove sockets and directories. Idempotent.

        The default is less than what a frontend gives the core's process to stop, so that the core outlives a rank that
        does not listen and ends it.
        """
        if self._closed or os.getpid() != self._owner:  # a fork of the owner has a copy of this object
            return
        self._closed = True
        deadline = time.monotonic() + grace
        for child in self._children:
            child.ask_to_stop()
        for child in self._children:
            child.end(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            child.close()
