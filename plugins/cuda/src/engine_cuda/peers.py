"""How the ranks of one machine find each other, tell each other something, and notice when one has gone.

Each rank listens on a socket in their private directory and calls on those before it: in the end every two hold a
connection, and the sockets' names are gone again. The system hangs a connection up when the process at its other end
ends, however it ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

POLL = 0.005
"""Seconds between looks for another rank's socket."""
NOTICE = 0.1
"""Seconds after which a rank that has gone is noticed at the latest."""
GRACE = 2.0
"""Seconds that work under way may take to end by itself after a rank has taken leave: it did its part before."""
FAREWELL = b"\x01"
LENGTH = struct.Struct("<q")


class Peers:
    """Connections to all other ranks of a group.

    Args:
        directory: private, where all ranks look.
        name: of this meeting: several may be held in one directory.
        timeout: seconds to wait for the others, here and in `exchange`.

    Raises:
        RuntimeError: a rank did not come, or has gone.
    """

    def __init__(self, directory: str, name: str, rank: int, size: int, timeout: float) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._name = name
        self._sockets: dict[int, socket.socket] = {}
        self._watch: threading.Thread | None = None
        self._closing = threading.Event()
        deadline = time.monotonic() + timeout
        try:
            self._meet(Path(directory), deadline)
        except TimeoutError as error:
            missing = [r for r in range(size) if r != rank and r not in self._sockets]
            self.close()
            raise RuntimeError(f"rank {rank} of {size} waited {timeout:.0f} s for ranks {missing} ({name})") from error
        except OSError as error:
            self.close()
            raise RuntimeError(f"rank {rank} of {size} cannot meet the others ({name}): {error}") from error

    def _meet(self, directory: Path, deadline: float) -> None:
        place = directory / f"{self._name}.{self._rank}"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(place))
            stack.callback(place.unlink, missing_ok=True)
            listener.listen(self._size)
            for other in range(self._rank):
                self._sockets[other] = _call(directory / f"{self._name}.{other}", deadline)
                self._sockets[other].sendall(LENGTH.pack(self._rank))
            while len(self._sockets) < self._size - 1:
                listener.settimeout(_left(deadline))
                visitor = listener.accept()[0]
                visitor.settimeout(_left(deadline))
                (number,) = LENGTH.unpack(_read(visitor, LENGTH.size))
                self._sockets[number] = visitor

    def exchange(self, data: bytes) -> list[bytes]:
        """What each rank gives, by rank. Every rank calls it, before `watch`. Raises RuntimeError."""
        found = [data] * self._size
        rank = self._rank
        try:
            for rank in self._sockets:
                self._sockets[rank].settimeout(self._timeout)
                self._sockets[rank].sendall(LENGTH.pack(len(data)) + data)
            for rank in self._sockets:
                (length,) = LENGTH.unpack(_read(self._sockets[rank], LENGTH.size))
                found[rank] = _read(self._sockets[rank], length)
        except TimeoutError as error:
            raise RuntimeError(f"rank {rank} did not answer for {self._timeout:.0f} s ({self._name})") from error
        except OSError as error:
            raise RuntimeError(f"rank {rank} has gone ({self._name})") from error
        return found

    def gone(self, timeout: float = 0.0) -> int | None:
        """A rank that has gone, within so many seconds; None where all are there."""
        poll = select.poll()
        ranks = {peer.fileno(): rank for rank, peer in self._sockets.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)  # and, unasked, what is hung up or broken
        for descriptor, _ in poll.poll(timeout * 1000):
            return ranks[descriptor]
        return None

    def took_leave(self, rank: int) -> bool:
        """Whether a rank that has gone closed its connection, having done what it was called for; else it was lost."""
        try:
            return self._sockets[rank].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == FAREWELL
        except OSError:
            return False

    def watch(self, gone: Callable[[str], None], release: Callable[[], None]) -> None:
        """Look after the others on a thread of its own.

        gone: called once, with who has gone: nothing may be begun with the others any more.
        release: called once after that, when what is under way can wait for that rank no longer: at once where it was
            lost, else after `GRACE`.
        """

        def look() -> None:
            rank = None
            while rank is None and not self._closing.is_set():
                rank = self.gone(NOTICE)
            if rank is None or self._closing.is_set():
                return
            gone(f"rank {rank} has gone")
            if not self.took_leave(rank) or not self._closing.wait(GRACE):
                release()

        self._watch = threading.Thread(target=look, name=f"engine-{self._name}", daemon=True)
        self._watch.start()

    def close(self, linger: float = 0.0) -> None:
        """Take leave, and end the watch. Idempotent.

        linger: seconds to wait at most until the others have gone as well.
        """
        self._closing.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join()
        for peer in self._sockets.values():
            with contextlib.suppress(OSError):
                peer.settimeout(0.0)
                peer.send(FAREWELL)
                peer.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + linger
        while self._sockets:
            rank = self.gone(max(0.0, deadline - time.monotonic()))
            if rank is None:
                break
            self._sockets.pop(rank).close()
        for peer in self._sockets.values():
            peer.close()
        self._sockets = {}


def _call(place: Path, deadline: float) -> socket.socket:
    while True:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(_left(deadline))
        try:
            peer.connect(str(place))
            return peer
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):  # it is not there yet, or has many callers
            peer.close()
            time.sleep(POLL)
        except OSError:
            peer.close()
            raise


def _read(peer: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = peer.recv(length - len(data))
        if not part:
            raise ConnectionError("it hung up")
        data += part
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
