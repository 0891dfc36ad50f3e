"""Processes started on another machine's behalf: what is asked and told, who does it, and who asks; over any transport.

The head asks agents so, and an engine core on another machine asks the head. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import zmq

from engine.interfaces.nodes import NODE_LOST
from engine.process.local import NodeProcess
from engine.types.errors import EngineDeadError, EngineError, NodeMissingError, rebuild_error
from engine.types.messages import Beat

log = logging.getLogger("engine.machines")

TICK_SECONDS = 0.05
"""How often it is looked whether what was started has ended."""
LONGEST_MESSAGE = 64 * 2**20
"""Bytes of one on a `Line`. ZeroMQ takes in frames of strangers too, before it knows that they have no key."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Start a process: see `engine.interfaces.nodes.Nodes.spawn`. number: the asker's own, for what follows."""

    number: int
    node: str
    module: str
    start: bytes
    what: str
    devices: int = 0


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """Close its standard input."""

    number: int


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End it."""

    number: int
    hangs: bool = False


Order = Spawn | LetGo | Kill | Beat


class Started(msgspec.Struct, frozen=True, tag="started"):
    """It runs."""

    number: int
    pid: int
    directory: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It could not be started: a typed error's parts."""

    number: int
    error: tuple[str, str, str, str]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """It has ended: its exit code, and that for people."""

    number: int
    code: int
    how: str


Told = Started | Refused | Ended | Beat


class Doer:
    """Does what one asker asks for. `take` and `look` on one thread; `tell` is called from any.

    Args:
        spawn: starts a process.
        tell: sends an answer.
    """

    def __init__(self, spawn: Callable[[Spawn], NodeProcess], tell: Callable[[Told], None]) -> None:
        self._spawn = spawn
        self._tell = tell
        self._running: dict[int, NodeProcess] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, order: Order) -> None:
        """Begin to do it: nothing here waits for a process."""
        match order:
            case Spawn():
                threading.Thread(target=self._start, args=(order,), name="spawn", daemon=True).start()
            case LetGo(number) if process := self._running.get(number):
                process.let_go()
            case Kill(number, hangs) if process := self._running.get(number):
                threading.Thread(target=process.kill, args=(hangs,), name="kill", daemon=True).start()
            case _:  # it has ended, and that was told
                pass

    def _start(self, order: Spawn) -> None:
        try:
            process = self._spawn(order)
        except EngineError as error:
            return self._tell(Refused(order.number, error.parts))
        except Exception as error:  # the driver's, or the machine's: who asked would wait for an answer
            log.exception("%s could not be started", order.what)
            found = EngineDeadError(
                f"start {order.what}", f"{type(error).__name__}: {error}", "the log there says more"
            )
            return self._tell(Refused(order.number, found.parts))
        with self._lock:
            closed = self._closed
            if not closed:
                self._running[order.number] = process
        if closed:  # the asker has gone meanwhile
            process.kill()
            return process.close()
        self._tell(Started(order.number, process.pid, process.directory))

    def look(self) -> None:
        """Tell who has ended."""
        with self._lock:
            ended = [(n, process, code) for n, process in self._running.items() if (code := process.poll()) is not None]
            for number, process, code in ended:
                del self._running[number]
                self._tell(Ended(number, code, process.describe()))
                process.close()

    def end(self) -> None:
        """The asker has gone: nothing that it started stays. Idempotent."""
        with self._lock:
            self._closed = True
            processes = list(self._running.values())
            self._running.clear()
        for process in processes:
            process.let_go()
        for process in processes:
            process.kill()
            process.close()


class Asker:
    """Asks a `Doer`. Any thread may spawn; one takes in what is told.

    Args:
        send: sends an order; from any thread.
        where: who is asked, for people: "node b (10.0.0.2)"; "" where it asks others, which say it.
        patience: seconds that a start may take.
    """

    def __init__(self, send: Callable[[Order], None], where: str, patience: float) -> None:
        self.where = where
        self._send = send
        self._patience = patience
        self._numbers = itertools.count(1)
        self._asked: dict[int, AskedProcess] = {}
        self._lost: str | None = None

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> NodeProcess:
        """See `engine.interfaces.nodes.Nodes.spawn`."""
        number = next(self._numbers)
        process = self._asked[number] = AskedProcess(number, self._send, self.where or f"node {node}")
        if self._lost is not None:
            process.end(NODE_LOST, self._lost)
        else:
            self._send(Spawn(number, node, module, start, what, devices))
        if not process.answered.wait(self._patience):
            process.kill()
            found = f"{self.where or 'the head'} did not answer for {self._patience:g} s"
            raise EngineDeadError(f"start {what}", found, "see whether it hangs, or was cut off")
        if process.refused is not None:
            del self._asked[number]
            raise process.refused
        if process.poll() == NODE_LOST:
            raise NodeMissingError(f"start {what}", process.describe(), "bring its machine back")
        return process

    def take(self, told: Told) -> None:
        """Take in what was told."""
        if isinstance(told, Beat) or (process := self._asked.get(told.number)) is None:
            return
        match told:
            case Started(_, pid, directory):
                process.started(pid, directory)
            case Refused(_, error):
                process.refuse(rebuild_error(error))
            case Ended(number, code, how):
                process.end(code, f"{how}, on {self.where}" if self.where else how)
                del self._asked[number]

    def lose(self, why: str) -> None:
        """Who is asked was lost, and with it what was started. Idempotent."""
        self._lost = self._lost or why
        for process in list(self._asked.values()):
            process.end(NODE_LOST, why)


class AskedProcess:
    """See `engine.process.local.NodeProcess`."""

    def __init__(self, number: int, send: Callable[[Order], None], where: str) -> None:
        self.pid = 0
        self.directory = ""
        self.answered = threading.Event()
        self.refused: EngineError | None = None
        self._number = number
        self._send = send
        self._where = where
        self._code: int | None = None
        self._how = ""

    def started(self, pid: int, directory: str) -> None:
        """It runs."""
        self.pid = pid
        self.directory = directory
        self.answered.set()

    def refuse(self, error: EngineError) -> None:
        """It does not."""
        self.refused = error
        self.answered.set()

    def end(self, code: int, how: str) -> None:
        """It has ended."""
        self._how = how
        if self._code is None:
            self._code = code
        self.answered.set()

    def poll(self) -> int | None:
        return self._code

    def let_go(self) -> None:
        if self._code is None:
            self._send(LetGo(self._number))

    def kill(self, hangs: bool = False) -> None:
        if self._code is None:
            self._send(Kill(self._number, hangs))

    def describe(self) -> str:
        return self._how or f"process {self.pid} on {self._where}"

    def close(self) -> None:
        """Whoever runs it does."""


class Line:
    """A ROUTER or DEALER with a thread of its own, to which any thread may give what is to be sent.

    Args:
        kind: zmq.ROUTER, which binds, or zmq.DEALER, which connects.
        address: where; "tcp://HOST:*" binds a free port.
        options: of the socket.
        heard: takes what came: the frames, of a ROUTER the peer's identity first.
        tick: called between messages, at least every TICK_SECONDS.
    """

    def __init__(
        self,
        kind: int,
        address: str,
        options: dict[int, Any],
        heard: Callable[[list[bytes]], None],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._heard = heard
        self._tick = tick
        self._context = zmq.Context()
        self._to_send: queue.SimpleQueue[Sequence[bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._socket = self._context.socket(kind)
            self._socket.set_hwm(0)
            self._socket.set(zmq.LINGER, 1000)
            self._socket.set(zmq.MAXMSGSIZE, LONGEST_MESSAGE)
            for option, value in options.items():
                self._socket.set(option, value)
            (self._socket.bind if kind == zmq.ROUTER else self._socket.connect)(address)
            self._woken = self._context.socket(zmq.PULL)
            self._woken.set_hwm(0)
            self._woken.bind("inproc://wake")
            self._wake = self._context.socket(zmq.PUSH)
            self._wake.set_hwm(0)  # whoever sends holds the lock, and must not wait
            self._wake.connect("inproc://wake")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            remedy = "name an address of this machine, and a port that is free"
            raise EngineDeadError(f"listen at {address}", str(error), remedy) from error
        self.address = cast(bytes, self._socket.get(zmq.LAST_ENDPOINT)).decode()
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)

    def start(self) -> None:
        """Begin to hear."""
        self._thread.start()

    def send(self, *frames: bytes) -> None:
        """Send it; never blocks. A closed line swallows it."""
        with self._lock:
            if not self._closed:
                self._to_send.put(frames)
                self._wake.send(b"")

    def close(self) -> None:
        """Send what is left, and hear nothing any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._to_send.put(None)
            self._wake.send(b"")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._woken):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(round(1000 * TICK_SECONDS)))
            if self._woken in ready:
                self._woken.recv()
                frames = self._to_send.get()
                if frames is None:
                    break
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send_multipart(frames, zmq.NOBLOCK)
            if self._socket in ready:
                frames = self._socket.recv_multipart()
                try:
                    self._heard(frames)
                except Exception:  # whatever a stranger sends
                    log.exception("a message to %s could not be taken in", self.address)
            try:
                self._tick()
            except Exception:  # what a driver raises: the line is others', too
                log.exception("a look at what %s has started failed", self.address)
        for one in (self._socket, self._woken, self._wake):
            one.close()
        self._context.term()


def server_keys(secret: bytes) -> dict[int, Any]:
    """The options of a socket that only those can speak to who know its public key."""
    return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: secret}


def client_keys(server: bytes) -> dict[int, Any]:
    """The options of a socket that speaks to the one with this public key."""
    public, secret = zmq.curve_keypair()
    return {zmq.CURVE_SERVERKEY: server, zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret}
