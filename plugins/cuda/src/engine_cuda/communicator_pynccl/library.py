"""NCCL through nccl4py's bindings: one communicator, whose errors are RuntimeErrors.

NVIDIA's names and rules: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/ (nccl4py 0.6). Its low bindings,
`nccl.bindings.nccl`, take addresses and streams as they are; those above them look at each tensor first, at a cost.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BINDINGS = "nccl.bindings.nccl"
SUM = 0
UINT8 = 1
SUCCESS, IN_PROGRESS = 0, 7
POLL = 0.02
LOCK_SECONDS = 5.0
"""That an abort waits for a call under way, which may itself be waiting for a rank that has gone."""


class Nccl:
    """A communicator of NCCL, of this process's rank.

    Args:
        exchange: what each rank gives, by rank; every rank calls it.
        on_thread: called on the thread that joins the others, first: it makes the device the current one.
        gone: a rank that has gone, or None.
        timeout: seconds to wait for the others.
        bindings: the module; None imports nccl4py's.

    Raises:
        RuntimeError: NCCL refuses, or the others do not come.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Callable[[bytes], list[bytes]],
        on_thread: Callable[[], None],
        gone: Callable[[], int | None],
        timeout: float,
        bindings: Any = None,
    ) -> None:
        self._nccl = bindings or importlib.import_module(BINDINGS)
        self._lock = threading.Lock()
        self._why = "the communicator is closed"
        with self._errors("get_unique_id"):
            own = bytes(self._nccl.get_unique_id()) if rank == 0 else b""
        unique_id = self._nccl.UniqueId.from_buffer(exchange(own)[0])
        self._comm: Any = self._join(rank, size, unique_id, on_thread, gone, timeout)

    def _join(
        self, rank: int, size: int, unique_id: Any, on_thread: Callable[[], None], gone: Callable[[], int | None],
        timeout: float,
    ) -> Any:  # fmt: skip
        """NCCL's own call has no end where a rank does not come, so it has a thread, which is left behind then."""
        made: list[Any] = []

        def join() -> None:
            try:
                on_thread()
                made.append(self._nccl.comm_init_rank(size, unique_id, rank))
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=join, name="engine-nccl-init", daemon=True)
        thread.start()
        deadline = time.monotonic() + timeout
        while not made:
            thread.join(POLL)
            if not made and (lost := gone()) is not None:
                raise RuntimeError(f"rank {lost} has gone while NCCL made its connections")
            if not made and time.monotonic() > deadline:
                raise RuntimeError(f"NCCL connected rank {rank} with no group of {size} within {timeout:.0f} s")
        if isinstance(made[0], Exception):
            raise RuntimeError(f"NCCL cannot connect rank {rank} of {size}: {made[0]}") from made[0]
        return made[0]

    def call(self, name: str, *arguments: Any, stream: int) -> None:
        """Queue one of NCCL's operations. Raises RuntimeError, also for what went wrong since the last one."""
        with self._lock:
            comm = self._living()
            with self._errors(name):
                getattr(self._nccl, name)(*arguments, comm, stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """The calls in it are one operation, in which ranks may send and receive at once."""
        with self._errors("group_start"):
            self._nccl.group_start()
        try:
            yield
        finally:
            with self._errors("group_end"):
                self._nccl.group_end()

    def check(self) -> None:
        """Raise RuntimeError for what went wrong in operations that were queued."""
        with self._lock:
            self._living()

    def _living(self) -> Any:
        if self._comm is None:
            raise RuntimeError(self._why)
        result = int(self._nccl.comm_get_async_error(self._comm))
        if result not in (SUCCESS, IN_PROGRESS):
            raise RuntimeError(f"NCCL: {self._nccl.get_error_string(result)}")
        return self._comm

    def abort(self, why: str) -> None:
        """End what is queued, whoever else has gone, and let go of everything. From any thread; idempotent."""
        held = self._lock.acquire(timeout=LOCK_SECONDS)
        try:
            comm = self._comm
            self._comm = None
            if comm is None:
                return
            self._why = why
            with self._errors("comm_abort"):
                self._nccl.comm_abort(comm)
        finally:
            if held:
                self._lock.release()

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (self._nccl.NCCLError, RuntimeError) as error:  # the second where its library is not found
            raise RuntimeError(f"NCCL's {name}: {str(error).strip()}") from error
