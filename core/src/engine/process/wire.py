"""What crosses a process boundary, and the one-way ZeroMQ sockets between a process and its parent.

The one codec is msgpack by msgspec, arrays as (dtype, shape, bytes). Numbers of type bfloat16, which numpy does not
have, are arrays of dtype `BFLOAT16`. Nothing is ever pickled. Unknown fields are ignored by the decoder, so a field may
be added without a flag day. ZeroMQ's own threads send and receive; nothing blocks.

On one machine sockets lie in a private directory. Between machines they are TCP, encrypted and authenticated by CURVE:
who hears has a key of its own, and only who was given its public half, in a start message, can speak to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
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
WATCH_MILLISECONDS = 200
"""How often whoever waits for the end of a connection looks whether it is closed at this end."""
CONNECT_SECONDS = 30.0
"""How long a connection to another machine may take, at least."""
LONGEST_MESSAGE = 2**30
"""Bytes of one over TCP. ZeroMQ takes in frames of strangers too, before it knows that they have no key."""
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


def framed(data: bytes) -> bytes:
    """What `read_frame` reads."""
    return len(data).to_bytes(8, "little") + data


class Link(msgspec.Struct, frozen=True):
    """How a child and its parent speak to each other. The default: by Unix sockets in the child's directory.

    Args:
        outputs: the address at which the parent hears.
        here: the address of the child's own machine, at which it listens.
        outputs_key, orders_key: the public keys of who hears: the parent, the child.
        orders_secret: the child's secret one.
        timeout: seconds after which a connection without a sign of life is lost.
    """

    outputs: str = ""
    here: str = ""
    outputs_key: bytes = b""
    orders_key: bytes = b""
    orders_secret: bytes = b""
    timeout: float = 0.0

    @classmethod
    def between(cls, there: str, timeout: float) -> tuple[Link, bytes]:
        """One of new keys to a machine of this address, without `outputs` yet, and the parent's secret key."""
        (outputs_key, secret), (orders_key, orders_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls("", there, outputs_key, orders_key, orders_secret, timeout), secret


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a child on another machine: the address at which it hears."""

    orders: str


def opening(link: Link, start: Any) -> bytes:
    """What a child reads from its standard input: see `engine.process.run`."""
    return framed(encode(link)) + framed(encode(start))


# -- sockets -----------------------------------------------------------------------------------------------------------
class Inbox(Generic[T]):
    """What hears others. One thread at a time.

    Args:
        kind: of the messages: a struct, or a union of tagged ones.
        address: to bind; "tcp://HOST:*" takes a free port.
        secret: of TCP: the secret key of who may be spoken to by those alone who know the public one.

    Attributes:
        close: hear nothing any more.
    """

    def __init__(self, kind: Any, address: str, secret: bytes = b"") -> None:
        self._context = zmq.Context()
        options: dict[int, Any] = {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: secret} if secret else {}
        options |= {zmq.MAXMSGSIZE: LONGEST_MESSAGE} if secret else {}
        self.socket = _socket(self._context, zmq.PULL, address, options)
        self._decode: Callable[[bytes], T] = decoder(kind).decode
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self.close = _ending(self, self._context, self.socket)

    def watch(self, files: Sequence[int]) -> None:
        """From now on `wait` and `get` also return when one of these is readable."""
        for file in files:
            self._poller.register(file, zmq.POLLIN)

    @property
    def address(self) -> str:
        """Where it was bound last."""
        return cast(bytes, self.socket.get(zmq.LAST_ENDPOINT)).decode()

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


def wait_for_any(inboxes: Sequence[Inbox[Any]], timeout: float) -> None:
    """Wait so many seconds at most until one of them has a message."""
    poller = zmq.Poller()
    for inbox in inboxes:
        poller.register(inbox.socket, zmq.POLLIN)
    poller.poll(round(timeout * 1000))


def encode_to_send(message: Any) -> bytes:
    """`encode`. Raises EngineDeadError for what cannot travel: somebody would wait for it for ever."""
    try:
        return encode(message)
    except Exception as error:  # what a driver put into an output, say
        log.error("a message to another process could not be encoded", exc_info=error)
        raise EngineDeadError("tell another process", f"{type(error).__name__}: {error}") from error


class Outbox:
    """What tells another. One thread at a time. What is told before the other end has bound its address waits.

    Args:
        address: to connect to.
        key: of TCP: the public key of who hears there.
        timeout: of TCP: seconds after which a connection without a sign of life is lost.

    Attributes:
        made: the connection was made, of TCP.
        drop: whoever was told has gone: forget what is not on its way.
    """

    def __init__(self, address: str, key: bytes = b"", timeout: float = 0.0) -> None:
        self._context = zmq.Context()  # its own, so that it can end, which waits until the last message is on its way
        self._monitor: zmq.Socket[bytes] | None = None
        self.address = address
        self.made = False
        self._until = time.monotonic() + max(timeout, CONNECT_SECONDS)
        self._closed = False
        if not key:
            self._socket = _socket(self._context, zmq.PUSH, address, {})
            self.drop = _ending(self, self._context, self._socket)
            return
        public, secret = zmq.curve_keypair()
        options: dict[int, Any] = {zmq.CURVE_SERVERKEY: key, zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret}
        options |= {zmq.HEARTBEAT_IVL: round(250 * timeout), zmq.HEARTBEAT_TIMEOUT: round(750 * timeout)}
        options |= {zmq.HANDSHAKE_IVL: round(1000 * timeout)}
        self._socket = _socket(self._context, zmq.PUSH, "", options)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.drop = _ending(self, self._context, self._socket, self._monitor)
        self._socket.connect(address)

    def lost(self) -> bool:
        """Whether the connection has broken, was silent for too long, or was not made: of TCP. One thread asks."""
        while self._monitor is not None and self._monitor.poll(0):
            self.made = True
            if int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder) == zmq.EVENT_DISCONNECTED:
                return True
        return self._monitor is not None and not self.made and time.monotonic() > self._until

    def wait_until_lost(self) -> None:
        """Return when it is, or this end is closed."""
        assert self._monitor is not None
        with contextlib.suppress(zmq.ContextTerminated):
            while not (self.lost() or self._closed):
                self._monitor.poll(WATCH_MILLISECONDS)
        self._monitor.close()

    def put(self, message: Any) -> None:
        """Tell it; never blocks. Raises EngineDeadError as `encode_to_send`."""
        self._socket.send(encode_to_send(message))

    def put_encoded(self, data: bytes) -> None:
        """Tell what `wire.encode` made."""
        self._socket.send(data)

    def close(self) -> None:
        """Wait until all is on its way, for a moment at most."""
        self._closed = True
        self._socket.close(linger=LINGER_MILLISECONDS)
        self._context.term()


def remove_directory(directory: str) -> None:
    """Remove a directory of sockets. It loses its name first: a socket that another process, or thread, binds in it
    meanwhile would keep it. Idempotent; two may do it at once."""
    nameless = f"{directory}-"
    with contextlib.suppress(OSError):
        os.rename(directory, nameless)
    shutil.rmtree(nameless, ignore_errors=True)


def _ending(owner: object, context: zmq.Context[Any], *sockets: zmq.Socket[Any]) -> Callable[[], None]:
    """What ends a context, at the latest when its owner is collected: as part of a cycle pyzmq would end the context
    before its sockets, and wait for these for ever. Idempotent."""
    ending = weakref.finalize(owner, lambda *_: context.destroy(linger=0), *sockets)  # which keeps the sockets
    ending.atexit = False
    return ending


def _socket(context: zmq.Context[Any], kind: int, address: str, options: Mapping[int, Any]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    for option, value in options.items():
        socket.set(option, value)
    try:
        if address:
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
        link: how they speak to each other.

    Attributes:
        inbox, outbox: what it is heard and told with.
        at_end: what is to be ended when all that was told is on its way.
    """

    def __init__(self, heard: Any, directory: str, link: Link = Link()) -> None:  # noqa: B008 - it is frozen
        self.directory = directory
        self.at_end = contextlib.ExitStack()
        orders = f"tcp://{link.here}:*" if link.outputs else f"ipc://{directory}/requests"
        self.inbox: Inbox[T] = Inbox(heard, orders, link.orders_secret)
        self.outbox = Outbox(link.outputs or f"ipc://{directory}/outputs", link.outputs_key, link.timeout)
        if link.outputs:
            self.send(Hello(self.inbox.address))

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
