"""Engine cores that step together, on one machine: a page of memory that all of them write and read, and a star of
stream sockets, with data-parallel rank 0 in its middle.

Before each step every core writes on the page how many tokens it is about to compute, and sleeps until all numbers are
there; the last one wakes them, by one call of the system. That is one sleep and one waking for each core and step,
whoever they are, and no message (docs/benchmarks/lockstep.md has what that costs, beside messages on sockets).

Where nobody has any tokens all of them sleep as the core's process does, on the sockets: who has some again says so to
rank 0 by a byte, and that to the others. A core that leaves writes it on the page, and closes its socket, killed or
not, which rank 0 reads as the end of the stream, or the others, where it is rank 0. Who is silent is seen on the page.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.interfaces.lockstep import Agreed
from engine.plugin.loading import brought
from engine.types.errors import ConfigError, EngineDeadError
from engine_parallel.page import BOOT, Page, machine

if TYPE_CHECKING:
    from engine.types.start import CoreStart

log = logging.getLogger("engine.parallel")

FAILED = 1
"""The exit code of a process that has logged why it ends."""
MEET_SECONDS = 1800.0
"""How long a core waits for the others when it starts: as long as an executor for its ranks."""
ANSWER_SECONDS = 5.0
"""How long one that has called may take to say who it is."""
RETRY_SECONDS = 0.02
LEFT_SECONDS = 5.0
"""When a core has left while this one starts, how long it may be told to stop, too, and the reason be heard."""
GRACE_SECONDS = 1.0
"""When a core has left, how long the others go on reading messages: mostly all of them are being stopped."""
PAUSE_SECONDS = 0.01
MOST_BYTES = 1 << 16
"""Of a greeting."""
ALL_AT_ONCE = "start all ranks within half an hour; their logs say what keeps them"
PAGE = "lockstep-page"
"""In the directory where they meet."""

COMPUTING = frozenset(
    {"platform", "communicator", "ops", "attention", "quantization", "experts", "model", "checkpoint", "drafter"}
)
"""Points whose drivers have to be the same on all cores: steps of one form on each, and the same experts."""

_NUMBER = struct.Struct("<i")
_CALL = b"\0"
"""To a core that sleeps, or is to look who has left: what is meant stands on the page."""
_HERE = b"\1"
"""From one that joins: it has found the page. From rank 0: all have."""


class Hello(msgspec.Struct):
    """What a core says of itself when it joins.

    Args:
        rank, size: its place.
        same: what has to be the same in all of them, and is not told: a hash.
        nonce: random, for the other's proof.
        proof: that it knows the token; b"" where there is none.
        machine: on which it runs.
    """

    rank: int
    size: int
    same: bytes
    nonce: bytes
    proof: bytes = b""
    machine: str = ""


class Welcome(msgspec.Struct):
    """Rank 0's answer.

    Args:
        refused: why it may not join; "" where it may.
        proof: that rank 0 knows the token, too.
        meeting: see `engine.types.start.WorkerStart`; a directory of rank 0's machine, with the page in it.
        page: which file that is, see `Page.identity`.
    """

    refused: str = ""
    proof: bytes = b""
    meeting: str = ""
    page: list[int] = []


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
    star = Star(
        start.lockstep or f"ipc://{worker.meeting}/lockstep",
        worker.dp_rank,
        worker.parallel.dp,
        same=brought("engine_identity", "compare weights")(worker)
        + msgspec.msgpack.encode(same, order="deterministic"),
        token=Path(start.lockstep_token).read_bytes().strip() if start.lockstep_token else b"",
        meeting=worker.meeting,
        home=worker.home,
        answer=start.step_timeout / 2,
    )
    threading.Thread(target=star.watch_start, name="lockstep", daemon=True).start()
    return star


class Star:
    """See `engine.interfaces.lockstep.Lockstep`. Built on all cores at once; returns when all have met.

    Args:
        address: "ipc://PATH" or "tcp://HOST:PORT", where rank 0 listens.
        rank, size: this core's place.
        same: what has to be equal in all of them; one that differs is refused.
        token: of who may join over tcp; b"" asks for none.
        meeting: of rank 0: the directory that it names to the others; "": one in `home` that ends with this object.
        meet, answer: seconds to wait for the others when they start, and for each agreement.

    Attributes:
        meeting: as rank 0 named it.
        messages: bytes sent and received, by this core, since they met.

    Raises ConfigError where the address is of no use, another is not let in, or the system cannot do it;
    EngineDeadError where the address cannot be bound, or somebody does not come.
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
        home: str = "",
        meet: float = MEET_SECONDS,
        answer: float = 300.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.meeting = meeting
        self.messages = 0
        self._made = ""
        self._address = address
        self._machine = machine()
        self._same = hashlib.sha256(same).digest()
        self._token = token
        self._answer = answer
        self._awake = False
        self._closed = False
        self._started = threading.Event()
        self._lost: EngineDeadError | None = None
        self._lost_at = 0.0
        self._sockets: dict[int, socket.socket] = {}  # of rank 0: the others', by rank; of these: rank 0's
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by file
        self._page: Page | None = None
        self._step = 0  # agreed on last
        self._last: list[int] = []
        self._agreed: Agreed | None = None
        deadline = time.monotonic() + meet
        if not self._machine and not address.startswith("ipc:"):
            raise ConfigError(
                f"let engine cores meet at {address}",
                f"{BOOT} cannot be read, so they cannot tell whether they are on one machine",
                "start all cores by one server, with --data-parallel-size alone",
            )
        try:
            if rank == 0:
                if not meeting:
                    self.meeting = self._made = tempfile.mkdtemp(prefix="engine-", dir=home or None)
                self._make_page(f"{self.meeting}/{PAGE}")
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
    def _make_page(self, path: str) -> None:
        try:
            self._page = Page(path, 0, self.size, make=True)
        except OSError as error:
            asked = f"make {path}, for the other engine cores"
            raise EngineDeadError(asked, str(error), "TMPDIR names a directory that can be written") from error

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
            while self._present() < self.size - 1:
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
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # from now on one that leaves ends all
                connection.sendall(_HERE)

    def _present(self) -> int:
        """How many have joined. One that has left may be started again: no worker has met another yet."""
        assert self._page is not None
        for rank in [rank for rank, connection in self._sockets.items() if _has_left(connection)]:
            self._sockets.pop(rank).close()
            self._page.forget(rank)
        return len(self._sockets)

    def _meet(self, connection: socket.socket, before: str) -> tuple[int | None, str]:
        """Who called; None and why where they are not let in."""
        connection.settimeout(ANSWER_SECONDS)
        nonce, until = os.urandom(32), time.monotonic() + ANSWER_SECONDS
        try:
            connection.sendall(nonce)
            hello = msgspec.msgpack.decode(_read_message(connection, until), type=Hello)
            why = self._objection(hello, nonce)
            proof = _proof(self._token, b"head", hello.nonce, nonce)
            assert self._page is not None
            welcome = Welcome(why) if why else Welcome("", proof, self.meeting, self._page.identity)
            connection.settimeout(ANSWER_SECONDS)
            _write_message(connection, welcome)
            if not why:
                _read(connection, len(_HERE), until)
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
        if hello.machine != self._machine:
            return f"rank {hello.rank} is on another machine than rank 0 ({BOOT} differs), and they share memory"
        self._present()
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
            _write_message(connection, Hello(self.rank, self.size, self._same, own, proof, self._machine))
            welcome = msgspec.msgpack.decode(_read_message(connection), type=Welcome)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            found = f"who listens there does not answer as rank 0 would: {type(error).__name__}: {error}"
            raise EngineDeadError(asked, found, "look at the log of rank 0") from error
        if welcome.refused:
            remedy = "start all ranks on one machine, with the same settings, versions and token"
            raise ConfigError(asked, welcome.refused, remedy)
        if not hmac.compare_digest(welcome.proof, _proof(self._token, b"head", own, nonce)):
            raise ConfigError(asked, "rank 0 has another token", "give all ranks the same token")
        self.meeting = welcome.meeting
        try:
            page = Page(f"{self.meeting}/{PAGE}", self.rank, self.size)
            if page.identity != welcome.page:
                raise OSError("the file of this path here is another one than rank 0's")
        except OSError as error:
            found = f"rank 0 is in another container, or has ended: its directory {self.meeting} is not here ({error})"
            remedy = "let TMPDIR name a folder that all share; without --enable-expert-parallel cores may be anywhere"
            raise ConfigError(asked, found, remedy) from error
        self._page = page
        _prepare(connection)
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection.sendall(_HERE)
            all_met = connection.recv(len(_HERE))
        except TimeoutError:
            asked = f"meet the other engine cores at {self._address}"
            raise EngineDeadError(asked, "rank 0 still waits for some of them", ALL_AT_ONCE) from None
        except OSError:
            all_met = b""
        if not all_met:
            raise EngineDeadError(asked, "rank 0 closed the connection before all had met", "look at the log of rank 0")
        connection.settimeout(None)

    def _late(self, last: str) -> EngineDeadError:
        others = range(1, self.size) if self.rank == 0 else range(1)
        missing = ", ".join(f"rank {rank}" for rank in others if rank not in self._sockets)
        asked = f"meet the other engine cores at {self._address}"
        return EngineDeadError(asked, f"not there: {missing}" + (f" ({last})" if last else ""), ALL_AT_ONCE)

    # -- stepping ------------------------------------------------------------------------------------------------------
    @property
    def files(self) -> list[int]:
        return list(self._ranks)

    @property
    def awake(self) -> bool:
        if self._closed or self._awake or self.gone() is not None:
            return True
        assert self._page is not None
        return self._page.begun(self._step + 1)  # whoever begins calls, which may have been heard before

    def agree(self, tokens: int, decodes: bool) -> Agreed | None:
        self._started.set()
        numbers = None if self._lost is not None else self._exchange(2 * tokens + (not decodes))
        if numbers is None:
            self._leave()
            return None
        self._awake = any(numbers)
        if not self._awake:
            return None
        if numbers != self._last:  # mostly each decodes what it did before
            told = np.array(numbers, np.int32)
            self._agreed = Agreed(np.maximum(told >> 1, 1), not (told & 1).any())
            self._last = numbers
        return self._agreed

    def _exchange(self, number: int) -> list[int] | None:
        """Everybody's number, by rank; None where one has left."""
        page, step = self._page, self._step + 1
        assert page is not None
        page.tell(step, number)
        if not self._awake:
            self._call(step)
        until = time.monotonic() + self._answer
        while (numbers := page.wait(step)) is None:
            if self.gone() is not None:
                return None
            if time.monotonic() > until and (late := page.late(step)):
                self._lose(late[0], f"has not said for {self._answer:g} s what it computes next")
                return None
        self._step = step
        return numbers

    def _call(self, step: int) -> None:
        """Wake those that sleep: rank 0 does, if it is awake itself."""
        assert self._page is not None
        late = self._page.late(step)
        for rank, connection in self._sockets.items():
            if rank in late:
                self._tell(rank, connection)

    def _tell(self, rank: int, connection: socket.socket) -> None:
        try:
            connection.send(_CALL, socket.MSG_DONTWAIT)
            self.messages += 1
        except BlockingIOError:  # it has many calls to read
            pass
        except OSError:
            self._lose(rank, "has left")

    def _hear(self) -> None:
        """Take in what the others have sent: calls, of which the page tells more, and their end."""
        for file, _ in self._poll.poll(0):
            rank = self._ranks[file]
            try:
                data = self._sockets[rank].recv(MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            self.messages += len(data)
            if not data:
                self._lose(rank, "has left")

    # -- leaving -------------------------------------------------------------------------------------------------------
    def gone(self) -> EngineDeadError | None:
        """Why this lockstep has ended, as far as it is known; looks, and does not wait. None where this core has left
        by itself, by `close`: why, it knows best."""
        if self._lost is None and self._page is not None and not self._closed:
            self._hear()
            if (left := self._page.left) is not None:
                self._lose(left, "has left" if left != self.rank else "was silent for too long, as the others found")
        return self._lost

    def _lose(self, rank: int, how: str) -> None:
        """The first time: one has left, or is taken for lost. The page says so to the others."""
        assert self._page is not None
        if self._lost is not None:
            return
        if self._page.left not in (None, rank):  # who is heard of last followed the first
            rank, how = self._page.left, "has left"
        self._lost = EngineDeadError(
            f"compute in step with data-parallel rank {rank} of {self.size}",
            f"it {how}",
            "its log says why; the cores share their experts, so none goes on without it: start all of them again",
        )
        self._lost_at = time.monotonic()
        self._page.leave(rank)
        for other, connection in self._sockets.items():
            if other != rank:
                self._tell(other, connection)

    def watch_start(self) -> None:
        """Until the first step: workers wait for those of other cores for half an hour, and nothing else would end them
        where such a core has left. Ends this process then. Takes no call away: another thread may wait for it."""
        page = self._page
        while page is not None and not self._started.wait(LEFT_SECONDS / 10):
            left = page.left is not None or any(_has_left(connection) for connection in self._sockets.values())
            if left and not self._started.wait(LEFT_SECONDS):
                log.error("the engine core cannot start: %s", self.gone())
                os._exit(FAILED)

    def _leave(self) -> None:
        """Nothing is computed any more. Raises why, but for a moment in which this core may be told to stop, too."""
        assert self._lost is not None
        if time.monotonic() - self._lost_at > GRACE_SECONDS:
            raise self._lost
        time.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        self._closed = True
        self._started.set()
        if self._page is not None:
            self._page.leave(self.rank)
            self._page.close()
        for connection in self._sockets.values():
            connection.close()
        self._poll = select.poll()
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
