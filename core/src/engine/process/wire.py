"""What crosses a process boundary, and the one-way ZeroMQ sockets between a process and its parent.

The one codec is msgpack by msgspec, arrays as (dtype, shape, bytes). Numbers of type bfloat16, which numpy does not
have, are arrays of dtype `BFLOAT16`. Nothing is ever pickled. Unknown fields are ignored by the decoder, so a field may
be added without a flag day. ZeroMQ's own threads send and receive; nothing blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, Generic, TypeVar, cast

import msgspec
import numpy as np
import zmq

from engine.types.embeds import BFLOAT16 as BFLOAT16
from engine.types.errors import EngineDeadError

T = TypeVar("T")

log = logging.getLogger("engine.process")

RECONNECT_MILLISECONDS = 20
"""How soon an end looks again for one that has not been bound yet."""
LINGER_MILLISECONDS = 2000
"""How long an end that closes waits until its last message is on its way."""

_NUMBERS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_DTYPES = {name: np.dtype(name) for name in _NUMBERS.split()} | {"bfloat16": BFLOAT16}
"""What travels, by the name that it has on the wire."""


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = (value.dtype.metadata or {}).get("holds", value.dtype.name)
        return (name, value.shape, np.ascontiguousarray(value).data)
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"{type(value)} does not travel")


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        if dtype not in _DTYPES:
            raise ValueError(f"an array of dtype {dtype!r} does not travel")
        return np.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)
    raise NotImplementedError(f"{kind} does not travel")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_hook)


def encode(message: Any) -> bytes:
    """A msgspec struct (arrays and all) as bytes. Raises NotImplementedError for a type that does not travel."""
    return _ENCODER.encode(message)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for `kind` (a struct, or a union of tagged ones), to be made once and kept. Arrays come back read-only.

    Its `decode` raises msgspec.DecodeError for bytes that are no such message.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook)


def read_frame(pipe: IO[bytes]) -> bytes:
    """One message from a pipe: its length in 8 bytes, little-endian, then its bytes.

    Raises EOFError where the pipe ends too early.
    """
    size = int.from_bytes(pipe.read(8), "little")
    data = pipe.read(size)
    if len(data) != size or not size:
        raise EOFError("the pipe ended before a whole message had come")
    return data


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """The counterpart of `read_frame`."""
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


# -- sockets -----------------------------------------------------------------------------------------------------------
class Inbox(Generic[T]):
    """What hears others. One thread at a time.

    Args:
        kind: of the messages: a struct, or a union of tagged ones.
        address: to bind.
    """

    def __init__(self, kind: Any, address: str) -> None:
        self._context = zmq.Context()
        self.socket = _socket(self._context, zmq.PULL, address)
        self._decode: Callable[[bytes], T] = decoder(kind).decode
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)

    def watch(self, files: Sequence[int]) -> None:
        """From now on `wait` and `get` also return when one of these is readable."""
        for file in files:
            self._poller.register(file, zmq.POLLIN)

    def fileno(self) -> int:
        """A descriptor that becomes readable, once, when messages come: then `take` until there is none."""
        return cast(int, self.socket.get(zmq.FD))

    def take(self) -> T | None:
        """The next message, if one is there. Raises msgspec.DecodeError for one that cannot be read."""
        return self._decode(self.socket.recv(zmq.NOBLOCK)) if self._there() else None

    def wait(self, timeout: float | None) -> bool:
        """Whether a message comes within so many seconds; None: wait until one does."""
        return bool(self._poller.poll(None if timeout is None else round(timeout * 1000)))

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
    """What tells another. One thread at a time. What is told before the other end has bound its address waits."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()  # its own, so that it can end, which waits until the last message is on its way
        self._socket = _socket(self._context, zmq.PUSH, address)

    def put(self, message: Any) -> None:
        """Tell it; never blocks. Raises EngineDeadError for what cannot travel: somebody would wait for it for ever."""
        try:
            data = encode(message)
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


def remove_directory(directory: str) -> None:
    """Remove a directory of sockets. It loses its name first: a socket that another process, or thread, binds in it
    meanwhile would keep it. Idempotent; two may do it at once."""
    nameless = f"{directory}-"
    with contextlib.suppress(OSError):
        os.rename(directory, nameless)
    shutil.rmtree(nameless, ignore_errors=True)


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


class Parent(Generic[T]):
    """The parent, as its child sees it.

    Args:
        heard: the type of what it says: a union of tagged structs.
        directory: private to both.

    Attributes:
        inbox, outbox: what it is heard and told with.
        at_end: what is to be ended when all that was told is on its way.
    """

    def __init__(self, heard: Any, directory: str) -> None:
        self.directory = directory
        self.inbox: Inbox[T] = Inbox(heard, f"ipc://{directory}/requests")
        self.outbox = Outbox(f"ipc://{directory}/outputs")
        self.at_end = contextlib.ExitStack()

    def send(self, message: Any) -> None:
        """Tell the parent; never blocks. Raises EngineDeadError for what cannot travel."""
        self.outbox.put(message)

    def receive(self, timeout: float | None = None, awake: float = 0.0) -> T | None:
        """The next message; None where none comes within `timeout` seconds (None: wait), of which the first `awake` are
        not slept through. One that cannot be read is logged."""
        try:
            return self.inbox.get(timeout, awake)
        except msgspec.DecodeError as error:
            log.error("a message from the parent process could not be read: %s", error)
            return None
