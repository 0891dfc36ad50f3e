"""`pynccl` with gloo in NCCL's place: nccl4py's functions, for addresses of the processor's memory.

What the body asks NCCL for, with which addresses, counts and types, is then what it asks for on GPUs.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from engine_cuda.communicator_pynccl.body import SUMMED, PyNcclBody

dist: Any = torch.distributed
DTYPES = {number: dtype for dtype, number in SUMMED.items()}


class NCCLError(Exception):
    """nccl4py's."""


class UniqueId:
    """nccl4py's: 128 bytes."""

    def __init__(self, data: bytes) -> None:
        assert len(data) == 128
        self._data = data

    def __bytes__(self) -> bytes:
        return self._data

    from_buffer = classmethod(lambda cls, data: cls(bytes(data)))


class Bindings:
    """`nccl.bindings.nccl`, as far as it is used, and as strict: what is grouped happens when the group ends."""

    NCCLError, UniqueId = NCCLError, UniqueId

    def __init__(self, directory: str, number: int, size: int) -> None:
        self._directory = directory
        self._number = number
        self._size = size
        self._grouped: list[Callable[[], Any]] | None = None
        self._group: Any = None

    def get_unique_id(self) -> UniqueId:
        assert self._number == 0
        return UniqueId(secrets.token_bytes(128))

    def comm_init_rank(self, count: int, unique_id: UniqueId, rank: int) -> Any:
        """The ranks meet by the id alone."""
        assert (count, rank) == (self._size, self._number)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        store = dist.FileStore(os.path.join(self._directory, bytes(unique_id)[:16].hex()), count)
        self._group = dist.ProcessGroupGloo(store, rank, count, options)
        self._group.barrier().wait()
        return self

    def comm_get_async_error(self, comm: Any) -> int:
        assert comm is self
        return 0

    def comm_abort(self, comm: Any) -> None:
        assert comm is self
        self._group = None

    def group_start(self) -> None:
        assert self._grouped is None
        self._grouped = []

    def group_end(self) -> None:
        calls, self._grouped = self._grouped, None
        assert calls is not None
        self._run(calls)

    def all_reduce(self, x: int, out: int, count: int, kind: int, op: int, comm: Any, stream: int) -> None:
        def work() -> Any:
            tensor = self._at(out, count, kind).copy_(self._at(x, count, kind).clone())
            return self._group.allreduce([tensor])

        self._queue(work, op, comm, stream)

    def all_gather(self, x: int, out: int, count: int, kind: int, comm: Any, stream: int) -> None:
        def work() -> Any:
            parts = list(self._at(out, count * self._size, kind).split(count))
            return self._group.allgather([parts], [self._at(x, count, kind)])

        self._queue(work, 0, comm, stream)

    def reduce_scatter(self, x: int, out: int, count: int, kind: int, op: int, comm: Any, stream: int) -> None:
        def work() -> None:
            whole = self._at(x, count * self._size, kind).clone()
            self._group.allreduce([whole]).wait()
            self._at(out, count, kind).copy_(whole.split(count)[self._number])

        self._queue(work, op, comm, stream)

    def reduce(self, x: int, out: int, count: int, kind: int, op: int, root: int, comm: Any, stream: int) -> None:
        def work() -> None:
            whole = self._at(x, count, kind).clone()
            self._group.allreduce([whole]).wait()
            if root == self._number:
                self._at(out, count, kind).copy_(whole)

        self._queue(work, op, comm, stream)

    def broadcast(self, x: int, out: int, count: int, kind: int, root: int, comm: Any, stream: int) -> None:
        def work() -> Any:
            tensor = self._at(out, count, kind)
            if root == self._number:
                tensor.copy_(self._at(x, count, kind).clone())
            options = dist.BroadcastOptions()
            options.rootRank = root
            return self._group.broadcast([tensor], options)

        self._queue(work, 0, comm, stream)

    def send(self, x: int, count: int, kind: int, peer: int, comm: Any, stream: int) -> None:
        self._queue(lambda: self._group.send([self._at(x, count, kind)], peer, 0), 0, comm, stream)

    def recv(self, x: int, count: int, kind: int, peer: int, comm: Any, stream: int) -> None:
        self._queue(lambda: self._group.recv([self._at(x, count, kind)], peer, 0), 0, comm, stream)

    def _queue(self, work: Callable[[], Any], op: int, comm: Any, stream: int) -> None:
        assert (op, stream) == (0, 7) and comm is self
        if self._grouped is None:
            self._run([work])
        else:
            self._grouped.append(work)

    @staticmethod
    def _run(calls: list[Callable[[], Any]]) -> None:
        try:
            for under_way in [call() for call in calls]:
                if under_way is not None:
                    under_way.wait()
        except RuntimeError as error:
            raise NCCLError(str(error)) from error

    @staticmethod
    def _at(address: int, count: int, kind: int) -> torch.Tensor:
        dtype = DTYPES[kind]
        return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


class PyNcclOnGloo(PyNcclBody):
    """The body without a device."""

    def __init__(self, context: Any) -> None:
        self._place = context.group
        super().__init__(context)

    def _bindings(self) -> Bindings:
        return Bindings(self._place.rendezvous, self._place.rank, self._place.size)

    def _make_current(self) -> None: ...

    def _open_side(self) -> None: ...

    def _stream(self) -> int:
        return 7

    def _drain(self) -> None: ...

    def barrier(self) -> None:
        """One byte, as on the device, without its stream."""
        token = torch.zeros(1, dtype=torch.uint8)
        self.all_reduce(token)
