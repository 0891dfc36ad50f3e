"""Engine cores that step together: a star over stream sockets, with data-parallel rank 0 in its middle.

Before each step every core tells how many tokens it is about to compute; rank 0, once it has all numbers, tells them to
all. Where nobody has any, all of them sleep, and nothing is sent until one has again: its number wakes rank 0, which
wakes the others. A number and an answer are a few bytes on a socket of the system, sent and read by the core's own
thread: ZeroMQ, with threads of its own on either side, takes three times as long (docs/benchmarks/lockstep.md).

A core that leaves closes its socket, killed or not, which the others read as the end of the stream. Of a machine that
is gone, without a word, the system's keepalive says so within some five seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.interfaces.lockstep import Agreed
from engine.plugin.loading import brought
from engine.types.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from engine.types.start import CoreStart

MEET_SECONDS = 1800.0
"""How long a core waits for the others when it starts: as long as an executor for its ranks."""
ANSWER_SECONDS = 5.0
"""How long one that has called may take to say who it is. Members wait so much longer than rank 0 for an answer: it
knows who is late."""
RETRY_SECONDS = 0.02
GRACE_SECONDS = 1.0
"""When a core has left, how long the others go on reading messages: mostly all of them are being stopped."""
PAUSE_SECONDS = 0.01
MOST_BYTES = 1 << 16
"""Of a greeting."""

COMPUTING = frozenset(
    {"platform", "communicator", "ops", "attention", "quantization", "experts", "model", "checkpoint", "drafter"}
)
"""Points whose drivers have to be the same on all cores: steps of one form on each, and the same experts."""

_NUMBER = struct.Struct("<i")
"""What a core tells: its tokens twice, and one more where they are not one for each row."""
_WAKE = -1
_LEFT = -2
"""In place of the first number: rank 0 wakes a core; one has left, and the number behind says which."""


class Hello(msgspec.Struct):
    """What a core says of itself when it joins.

    Args:
        rank, size: its place.
        same: what has to be the same in all of them, and is not told: a hash.
        nonce: random, for the other's proof.
        proof: that it knows the token; b"" where there is none.
    """

    rank: int
    size: int
    same: bytes
    nonce: bytes
    proof: bytes = b""


class Welcome(msgspec.Struct):
    """Rank 0's answer.

    Args:
        refused: why it may not join; "" where it may.
        proof: that rank 0 knows the token, too.
        meeting: see `engine.types.start.WorkerStart`; a directory of rank 0's machine.
    """

    refused: str = ""
    proof: bytes = b""
    meeting: str = ""


def of_core(start: CoreStart) -> Star:
    """The lockstep of an engine core, see `engine.interfaces.lockstep`: where its workers meet those of the others."""
    worker = start.worker
    drivers = [
        (choice.point, choice.kind, choice.driver, choice.distribution, choice.version, choice.options)
        for choice in worker.choices
        if choice.point in COMPUTING
    ]
    same = (
        *(drivers, worker.model, worker.dtype, worker.kv_cache_dtype, worker.parallel, worker.batch_invariant),
        *(worker.max_model_len, worker.max_num_seqs, worker.max_num_batched_tokens),
        worker.num_kv_pages is None and worker.kv_cache_memory is None,  # a largest step is made to find out
    )
    meeting, made = worker.meeting, ""
    if worker.dp_rank == 0 and not meeting:
        meeting = made = tempfile.mkdtemp(prefix="engine-")
    return Star(
        start.lockstep or f"ipc://{meeting}/lockstep",
        worker.dp_rank,
        worker.parallel.dp,
        same=brought("engine_identity", "compare weights")(worker)
        + msgspec.msgpack.encode(same, order="deterministic"),
        token=Path(start.lockstep_token).read_bytes().strip() if start.lockstep_token else b"",
        meeting=meeting,
        made=made,
        answer=start.step_timeout / 2,
    )


class Star:
    """See `engine.interfaces.lockstep.Lockstep`. Built on all cores at once; returns when all have met.

    Args:
        address: "ipc://PATH" or "tcp://HOST:PORT", where rank 0 listens.
        rank, size: this core's place.
        same: what has to be equal in all of them; one that differs is refused.
        token: of who may join over tcp; b"" asks for none.
        meeting: of rank 0: the directory that it names to the others. made: it, where it ends with this object.
        meet, answer: seconds to wait for the others when they start, and for each agreement.

    Attributes:
        meeting: as rank 0 named it.
        messages: sent and received, by this core, since they met.

    Raises ConfigError where the address is of no use, or another is not let in; EngineDeadError where it cannot be
    bound, or somebody does not come.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        *,
        same: bytes = b"",
        token: bytes = b"",
        meeting: str = "",
        made: str = "",
        meet: float = MEET_SECONDS,
        answer: float = 300.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.meeting = meeting
        self.messages = 0
        self._made = made
        self._address = address
        self._same = hashlib.sha256(same).digest()
        self._token = token
        self._answer = answer
        self._awake = False
        self._lost: EngineDeadError | None = None
        self._lost_at = 0.0
        self._sockets: dict[int, socket.socket] = {}  # of rank 0: the others', by rank; of these: rank 0's
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by file
        self._frame = struct.Struct(f"<{size}i")
        self._numbers = [0] * size
        self._missing: set[int] = set()
        deadline = time.monotonic() + meet
        try:
            if rank == 0:
                self._receive_all(deadline)
            else:
                self._join(deadline)
        except BaseException:
            self.close()
            raise
        for other, connection in self._sockets.items():
            self._poll.register(connection, select.POLLIN)
            self._ranks[connection.fileno()] = other

    # -- meeting -------------------------------------------------------------------------------------------------------
    def _receive_all(self, deadline: float) -> None:
        family, place = _parsed(self._address)
        refused = ""
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            if family != socket.AF_UNIX:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(place)
            except OSError as error:
                asked = f"listen at {self._address} for the other engine cores"
                raise EngineDeadError(asked, str(error), "name a free address of this machine") from error
            listening.listen(self.size)
            while len(self._sockets) < self.size - 1:
                listening.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connection, caller = listening.accept()
                except TimeoutError:
                    raise self._late(refused) from None
                rank, refused = self._meet(connection, refused)
                if rank is None:
                    connection.close()
                    refused = f"{caller or 'somebody'} was not let in: {refused}"
                else:
                    self._sockets[rank] = connection
        if family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                os.unlink(str(place))

    def _meet(self, connection: socket.socket, before: str) -> tuple[int | None, str]:
        """Who called; None and why where they are not let in."""
        connection.settimeout(ANSWER_SECONDS)
        nonce, until = os.urandom(32), time.monotonic() + ANSWER_SECONDS
        try:
            connection.sendall(nonce)
            hello = msgspec.msgpack.decode(_read_message(connection, until), type=Hello)
            why = self._objection(hello, nonce)
            proof = _proof(self._token, b"head", hello.nonce, nonce)
            welcome = Welcome(why) if why else Welcome("", proof, self.meeting)
            connection.settimeout(ANSWER_SECONDS)
            _write_message(connection, welcome)
        except (OSError, EOFError, msgspec.DecodeError, struct.error) as error:
            return None, f"{type(error).__name__}: {error}"
        _prepare(connection)
        return (None, why) if why else (hello.rank, before)

    def _objection(self, hello: Hello, nonce: bytes) -> str:
        proof = _proof(self._token, b"member", nonce, hello.nonce, _NUMBER.pack(hello.rank), hello.same)
        if not hmac.compare_digest(proof, hello.proof):
            return "it has another token"
        if hello.size != self.size:
            return f"rank {hello.rank} counts {hello.size} engine cores, and rank 0 counts {self.size}"
        there = self._sockets.get(hello.rank)
        if there is not None and _has_left(there):  # and was started again
            self._sockets.pop(hello.rank).close()
        if not 0 < hello.rank < self.size or hello.rank in self._sockets:
            return f"a core of rank {hello.rank} is there, or cannot be"
        if hello.same != self._same:
            return f"rank {hello.rank} has another model, other settings, or other versions of plugins than rank 0"
        return ""

    def _join(self, deadline: float) -> None:
        family, place = _parsed(self._address)
        while True:
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.settimeout(ANSWER_SECONDS)
                connection.connect(place)
                nonce, own = _read(connection, 32), os.urandom(32)
            except (OSError, EOFError) as error:  # it does not stand yet, or has enough
                connection.close()
                if time.monotonic() > deadline:
                    raise self._late(str(error)) from error
                time.sleep(RETRY_SECONDS)
                continue
            break
        self._sockets[0] = connection
        proof = _proof(self._token, b"member", nonce, own, _NUMBER.pack(self.rank), self._same)
        asked = f"join the engine cores at {self._address} as data-parallel rank {self.rank} of {self.size}"
        try:
            _write_message(connection, Hello(self.rank, self.size, self._same, own, proof))
            welcome = msgspec.msgpack.decode(_read_message(connection), type=Welcome)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            found = f"who listens there does not answer as rank 0 would: {type(error).__name__}: {error}"
            raise EngineDeadError(asked, found, "look at the log of rank 0") from error
        if welcome.refused:
            raise ConfigError(asked, welcome.refused, "start all ranks with the same settings, versions and token")
        if not hmac.compare_digest(welcome.proof, _proof(self._token, b"head", own, nonce)):
            raise ConfigError(asked, "rank 0 has another token", "give all ranks the same token")
        if welcome.meeting and not os.path.isdir(welcome.meeting):
            found = f"rank 0 is on another machine: its directory {welcome.meeting} is not here"
            remedy = "share experts among cores of one machine; without --enable-expert-parallel they may be anywhere"
            raise ConfigError(asked, found, remedy)
        self.meeting = welcome.meeting
        _prepare(connection)
        seconds, micro = divmod(int((self._answer + ANSWER_SECONDS) * 1e6), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, micro))

    def _late(self, last: str) -> EngineDeadError:
        others = range(1, self.size) if self.rank == 0 else range(1)
        missing = ", ".join(f"rank {rank}" for rank in others if rank not in self._sockets)
        asked = f"meet the other engine cores at {self._address}"
        remedy = "start all ranks within half an hour; their logs say what keeps them"
        return EngineDeadError(asked, f"not there: {missing}" + (f" ({last})" if last else ""), remedy)

    # -- stepping ------------------------------------------------------------------------------------------------------
    @property
    def files(self) -> list[int]:
        return list(self._ranks)

    @property
    def awake(self) -> bool:
        return self._awake or self._lost is not None or bool(self._poll.poll(0))

    def agree(self, tokens: int, decodes: bool) -> Agreed | None:
        numbers: Sequence[int] | None = None
        if self._lost is None:
            number = 2 * tokens + (not decodes)
            numbers = self._gather(number) if self.rank == 0 else self._ask(number)
        if numbers is None:
            self._leave()
            return None
        self._awake = any(numbers)
        if not self._awake:
            return None
        told = np.array(numbers, np.int32)
        return Agreed(np.maximum(told >> 1, 1), not (told & 1).any())

    def _gather(self, number: int) -> Sequence[int] | None:
        """Rank 0's part: everybody's numbers, which it tells them; None where one has left."""
        numbers, missing = self._numbers, self._missing
        numbers[0] = number
        missing.update(self._sockets)
        for rank in tuple(missing):
            self._take(rank)
        if not self._awake and self._lost is None:
            frame = self._frame.pack(_WAKE, *[0] * (self.size - 1))
            for rank in missing:
                self._tell(rank, frame)
        deadline = time.monotonic() + self._answer
        while missing and self._lost is None:
            ready = self._poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            if not ready:
                self._lose(min(missing), f"has not said for {self._answer:g} s what it computes next")
            for file, _ in ready:
                self._take(self._ranks[file])
        if self._lost is None:
            frame = self._frame.pack(*numbers)
            for rank in self._sockets:
                self._tell(rank, frame)
        return numbers if self._lost is None else None

    def _take(self, rank: int) -> None:
        """A core's number, if it is there; of one whose number is known nothing can come but its end."""
        try:
            data = self._sockets[rank].recv(_NUMBER.size, socket.MSG_DONTWAIT)
            while 0 < len(data) < _NUMBER.size:
                data += _read(self._sockets[rank], _NUMBER.size - len(data))
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            return self._lose(rank, f"cannot be reached: {error}")
        if not data or rank not in self._missing:
            return self._lose(rank, "has left" if not data else "has told two numbers for one step")
        self.messages += 1
        (self._numbers[rank],) = _NUMBER.unpack(data)
        self._missing.discard(rank)

    def _tell(self, rank: int, frame: bytes) -> None:
        try:
            self._sockets[rank].sendall(frame)
            self.messages += 1
        except OSError as error:
            self._lose(rank, f"cannot be reached: {error}")

    def _ask(self, number: int) -> Sequence[int] | None:
        """The others' part: tell rank 0, and hear of all; None where one has left."""
        connection = self._sockets[0]
        try:
            connection.sendall(_NUMBER.pack(number))
            self.messages += 1
            while True:
                numbers: tuple[int, ...] = self._frame.unpack(_read(connection, self._frame.size))
                self.messages += 1
                if numbers[0] != _WAKE:
                    break
        except BlockingIOError:
            self._lose(0, f"has not said for {self._answer:g} s what the others compute next")
            return None
        except (OSError, EOFError):
            self._lose(0, "has left")
            return None
        if numbers[0] == _LEFT:
            self._lose(numbers[1], "has left")
        return numbers if self._lost is None else None

    # -- leaving -------------------------------------------------------------------------------------------------------
    def gone(self) -> EngineDeadError | None:
        """Why this lockstep has ended, as far as it is known; looks, and does not wait."""
        if self._lost is None:
            for file, _ in self._poll.poll(0):
                connection, rank = self._sockets[self._ranks[file]], self._ranks[file]
                if _has_left(connection):
                    self._lose(rank, "has left")
                elif rank == 0 and (named := self._named(connection)) is not None:
                    self._lose(named, "has left")
        return self._lost

    def _named(self, connection: socket.socket) -> int | None:
        """Who has left, where rank 0 has said so and nobody has read it; a call to wake may lie before."""
        with contextlib.suppress(OSError):
            data = connection.recv(2 * self._frame.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            for numbers in self._frame.iter_unpack(data[: len(data) // self._frame.size * self._frame.size]):
                if numbers[0] == _LEFT:
                    return int(numbers[1])
        return None

    def _lose(self, rank: int, how: str) -> None:
        if self._lost is not None:
            return
        self._lost = EngineDeadError(
            f"compute in step with data-parallel rank {rank} of {self.size}",
            f"it {how}",
            "its log says why; the cores share their experts, so none goes on without it: start all of them again",
        )
        self._lost_at = time.monotonic()
        if self.rank == 0:
            frame = self._frame.pack(_LEFT, rank, *[0] * (self.size - 2))
            for other, connection in self._sockets.items():
                if other != rank:
                    with contextlib.suppress(OSError):
                        connection.sendall(frame)

    def _leave(self) -> None:
        """Nothing is computed any more. Raises why, but for a moment in which this core may be told to stop, too."""
        assert self._lost is not None
        if time.monotonic() - self._lost_at > GRACE_SECONDS:
            raise self._lost
        time.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._ranks.clear()
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)


def _parsed(address: str) -> tuple[int, Any]:
    """The family of an address, and what `bind` and `connect` take. Raises ConfigError."""
    kind, _, place = address.partition("://")
    if kind == "ipc" and place:
        return socket.AF_UNIX, place
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    if kind != "tcp" or not host or not port.isdecimal():
        raise ConfigError(
            f"let engine cores meet at {address!r}", "it is no address", "name one, like tcp://10.0.0.1:29550"
        )
    try:
        anywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        anywhere = False
    if anywhere:
        raise ConfigError(
            f"let engine cores meet at {address!r}",
            "that is every address of this machine, for anybody who reaches it",
            "name the one at which the others reach rank 0",
        )
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"let engine cores meet at {address!r}", str(error), "name a host that can be found"
        ) from error
    return found[0][0], found[0][4]


def _prepare(connection: socket.socket) -> None:
    """For small messages that are waited for; a machine that is gone is noticed."""
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000)):
        if (number := getattr(socket, option, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, seconds)


def _has_left(connection: socket.socket) -> bool:
    """Whether the other end is closed and nothing is there that it said before."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"".join(parts), "sha256") if token else b""


def _read(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """Raises EOFError where the other end is closed, TimeoutError where not all is there at a time (time.monotonic)."""
    data = b""
    while len(data) < size:
        if until is not None:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("it takes too long to say who it is")
            connection.settimeout(left)
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return data


def _read_message(connection: socket.socket, until: float | None = None) -> bytes:
    (size,) = _NUMBER.unpack(_read(connection, _NUMBER.size, until))
    if not 0 < size <= MOST_BYTES:
        raise EOFError(f"a greeting of {size} bytes")
    return _read(connection, size, until)


def _write_message(connection: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(_NUMBER.pack(len(data)) + data)
