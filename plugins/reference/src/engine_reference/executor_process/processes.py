"""The processes of all ranks: start them, speak to them, see who has died, end them without a trace."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import psutil
import zmq

from engine.process import wire
from engine.process.child import make_private_directory
from engine.types.errors import EngineDeadError
from engine.types.start import WorkerStart
from engine_reference.executor_process.messages import News, Order, RankStart, Stop

MODULE = "engine_reference.executor_process.rank"


class Ranks:
    """One process a rank, each behind a socket of its own, with one socket for all that they tell.

    Everything lies in a private directory: the sockets, and the place where communicators meet.
    """

    def __init__(self, worker: str, starts: Sequence[WorkerStart]) -> None:
        self.size = len(starts)
        self._owner = os.getpid()
        self._closed = False
        self.directory = make_private_directory("engine-ranks-", f"{self.size} ranks")
        self._context = zmq.Context()
        self._decode = wire.decoder(News).decode
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        news = f"ipc://{self.directory}/news"
        self._news: zmq.Socket[bytes] | None = None
        try:
            self._news = self._bind(zmq.PULL, news)
            for start in starts:
                orders = f"ipc://{self.directory}/orders-{start.rank}"
                self._sockets.append(self._bind(zmq.PUSH, orders))
                message = RankStart(
                    worker=worker,
                    message=msgspec.structs.replace(start, rendezvous=self.directory),
                    orders=orders,
                    news=news,
                )
                # A session of its own: Ctrl-C in a terminal reaches the parent alone, which then stops in order.
                process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, self.directory], stdin=subprocess.PIPE, start_new_session=True
                )
                self._processes.append(process)
                assert process.stdin is not None
                wire.write_frame(process.stdin, wire.encode(message))
        except (OSError, zmq.ZMQError) as error:
            self.close(0)
            raise EngineDeadError(f"start {self.size} ranks", f"a process could not be started: {error}") from error
        except BaseException:
            self.close(0)
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def send(self, order: Order) -> None:
        """Queue an order for every rank, encoded once; never blocks. A dead rank swallows it."""
        data = wire.encode(order)
        for socket in self._sockets:
            with contextlib.suppress(zmq.Again):
                socket.send(data, zmq.NOBLOCK)

    def receive(self, seconds: float) -> News | None:
        """The next message, waited for so long; None where none comes. Raises msgspec.DecodeError."""
        assert self._news is not None
        if not self._news.poll(int(seconds * 1000)):
            return None
        news: News = self._decode(self._news.recv())
        return news

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        return [rank for rank, process in enumerate(self._processes) if process.poll() is not None]

    def describe(self, rank: int) -> str:
        """A rank with its process and the state of that, for people."""
        process = self._processes[rank]
        code = process.poll()
        if code is not None:
            how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        else:
            try:
                how = psutil.Process(process.pid).status()
            except psutil.Error:
                how = "gone"
        return f"rank {rank} of {self.size} (process {process.pid}, {how})"

    def close(self, grace: float = 3.0) -> None:
        """End every process, with so many seconds to leave by itself; remove sockets and directory. Idempotent.

        The default is less than what a frontend gives the core's process to stop, so that the core outlives a rank that
        does not listen and ends it.
        """
        if self._closed or os.getpid() != self._owner:  # a fork of the owner has a copy of this object
            return
        self._closed = True
        if grace:
            self.send(Stop())
        deadline = time.monotonic() + grace
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(address)
        return socket
