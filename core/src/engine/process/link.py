"""One-way ZeroMQ sockets between a process and its parent. ZeroMQ's own threads send and receive; nothing blocks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import zmq

from engine.process import wire
from engine.types.errors import EngineDeadError

T = TypeVar("T")

log = logging.getLogger("engine.process")

RECONNECT_MILLISECONDS = 20
"""How soon an end looks again for one that has not been bound yet."""
LINGER_MILLISECONDS = 2000
"""How long an end that closes waits until its last message is on its way."""


class Inbox(Generic[T]):
    """What hears others. One thread at a time.

    Args:
        kind: of the messages: a struct, or a union of tagged ones.
        address: to bind.
    """

    def __init__(self, kind: Any, address: str) -> None:
        self._context = zmq.Context()
        self.socket = _socket(self._context, zmq.PULL, address)
        self._decode: Callable[[bytes], T] = wire.decoder(kind).decode

    def fileno(self) -> int:
        """A descriptor that becomes readable, once, when messages come: then `take` until there is none."""
        return cast(int, self.socket.get(zmq.FD))

    def take(self) -> T | None:
        """The next message, if one is there. Raises msgspec.DecodeError for one that cannot be read."""
        return self._decode(self.socket.recv(zmq.NOBLOCK)) if self._there() else None

    def wait(self, timeout: float | None) -> bool:
        """Whether a message comes within so many seconds; None: wait until one does."""
        return bool(self.socket.poll(None if timeout is None else round(timeout * 1000)))

    def get(self, timeout: float | None, awake: float = 0.0) -> T | None:
        """The next message; None where none comes within `timeout` seconds (None: wait), of which the first `awake` are
        not slept through. Raises msgspec.DecodeError for one that cannot be read."""
        if timeout != 0 and not self._comes(awake) and not self.wait(timeout):
            return None
        return self.take()

    def _comes(self, within: float) -> bool:
        until = time.perf_counter() + within
        while within and not self._there():
            if time.perf_counter() > until:
                return False
            os.sched_yield()
        return within > 0

    def _there(self) -> int:
        return cast(int, self.socket.get(zmq.EVENTS)) & zmq.POLLIN

    def bind(self, address: str) -> None:
        """Hear one more, which connects to this address. Raises OSError where it cannot be bound."""
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), address) from error

    def unbind(self, address: str) -> None:
        """Hear one no more; what it sent before may still come."""
        self.socket.unbind(address)

    def close(self) -> None:
        """Hear nothing any more."""
        self._context.destroy(linger=0)


def wait_for_any(inboxes: Sequence[Inbox[Any]], timeout: float) -> None:
    """Wait so many seconds at most until one of them has a message."""
    poller = zmq.Poller()
    for inbox in inboxes:
        poller.register(inbox.socket, zmq.POLLIN)
    poller.poll(round(timeout * 1000))


class Outbox:
    """What tells another. One thread at a time.

    Args:
        address: to connect to: what is told before the other end has bound it waits.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()  # its own, so that it can end, which waits until the last message is on its way
        self._socket = _socket(self._context, zmq.PUSH, address)

    def put(self, message: Any) -> None:
        """Tell it; never blocks. Raises EngineDeadError for what cannot travel: somebody would wait for it for ever."""
        try:
            data = wire.encode(message)
        except Exception as error:  # what a driver put into an output, say
            log.error("a message to another process could not be encoded", exc_info=error)
            raise EngineDeadError("tell another process", f"{type(error).__name__}: {error}") from error
        self._socket.send(data)

    def put_encoded(self, data: bytes) -> None:
        """Tell what `wire.encode` made."""
        self._socket.send(data)

    def drop(self) -> None:
        """Whoever was told has gone: forget what is not on its way."""
        self._context.destroy(linger=0)

    def close(self) -> None:
        """Wait until all is on its way, for a moment at most."""
        self._socket.close(linger=LINGER_MILLISECONDS)
        self._context.term()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    try:
        (socket.bind if kind == zmq.PULL else socket.connect)(address)
    except zmq.ZMQError:
        context.destroy(linger=0)
        raise
    return socket
