"""How ranks come to share memory: rank 0 makes it, and hands it to each of the others through a socket.

The memory has no name (memfd), so nothing is left of it when the last process ends, however it ends. With it come the
ends of a socket pair for every two ranks. Nothing is ever written into those: the system hangs one end up when the
process that holds the other ends, which is how a rank notices.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
from pathlib import Path

NAME = "shm"
"""The socket's, in the ranks' private directory."""
POLL = 0.005
"""Seconds between looks for rank 0's socket."""


def meet(directory: str, rank: int, size: int, memory_bytes: int, timeout: float) -> tuple[int, list[int]]:
    """Meet the other ranks of a group.

    Args:
        directory: private, where all ranks look.
        memory_bytes: how much to share.
        timeout: seconds to wait for the others.

    Returns:
        A descriptor of the shared memory, zeroed; by rank a descriptor that hangs up when that rank ends, -1 for ours.
        Both are the caller's to close.

    Raises:
        RuntimeError: a rank did not come, or the memory cannot be had.
    """
    deadline = time.monotonic() + timeout
    try:
        return _host(directory, size, memory_bytes, deadline) if rank == 0 else _join(directory, rank, size, deadline)
    except TimeoutError as error:
        raise RuntimeError(f"rank {rank} of {size} met not all others within {timeout:.0f} s") from error
    except OSError as error:
        raise RuntimeError(f"rank {rank} of {size} cannot share memory with the others: {error}") from error


def _host(directory: str, size: int, memory_bytes: int, deadline: float) -> tuple[int, list[int]]:
    path = Path(directory, NAME)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        stack.callback(path.unlink, missing_ok=True)
        listener.listen(size)
        visitors: dict[int, socket.socket] = {}
        while len(visitors) < size - 1:
            listener.settimeout(_left(deadline))
            visitor = stack.enter_context(listener.accept()[0])
            visitor.settimeout(_left(deadline))
            visitors[int.from_bytes(visitor.recv(4), "little")] = visitor
        memory = os.memfd_create("engine-shm")
        stack.callback(os.close, memory)
        os.posix_fallocate(memory, 0, memory_bytes)  # now, or a full memory would end a rank in the midst of work
        ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for first in range(size):
            for second in range(first + 1, size):
                ends[first][second], ends[second][first] = map(stack.enter_context, socket.socketpair())
        for other, visitor in visitors.items():
            fds = [memory, *(ends[other][peer].fileno() for peer in range(size) if peer != other)]
            socket.send_fds(visitor, [b"x"], fds)
        peers = [-1 if peer == 0 else os.dup(ends[0][peer].fileno()) for peer in range(size)]
        return os.dup(memory), peers


def _join(directory: str, rank: int, size: int, deadline: float) -> tuple[int, list[int]]:
    with socket.socket(socket.AF_UNIX) as host:
        while True:
            host.settimeout(_left(deadline))
            try:
                host.connect(str(Path(directory, NAME)))
                break
            except (FileNotFoundError, ConnectionRefusedError):  # it is not there yet
                time.sleep(POLL)
        host.sendall(rank.to_bytes(4, "little"))
        host.settimeout(_left(deadline))
        data, ancillary, _, _ = host.recvmsg(1, socket.CMSG_SPACE(size * array.array("i").itemsize))
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data or len(fds) != size:
        for fd in fds:
            os.close(fd)
        raise ConnectionError("rank 0 has gone")
    for fd in fds:
        os.set_inheritable(fd, False)
    memory, *others = fds
    return memory, [*others[:rank], -1, *others[rank:]]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
