"""The body of communicator `gloo`.

It makes a gloo process group of its own instead of torch.distributed's default one: no module-level state, so several
engines, or several ranks as threads of a test, live in one process. On one machine ranks find each other through a file
in the engine's private directory and listen on free ports of the loopback device; on several, through the core's store,
and they listen at their machine's address alone. Nothing collides with another engine.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from engine.interfaces.communicator import Collective, Sending
    from engine.interfaces.context import WorkerContext

dist: Any = torch.distributed  # its stubs know neither gloo's options nor its collectives

LONGEST_WAIT = datetime.timedelta(hours=1)
"""For ranks that are slow to load or to compute. One that hangs is the executor's business, which ends all sooner."""

DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int8, torch.uint8,
    }
)  # fmt: skip
"""What gloo adds up and carries."""


class Gloo:
    """See `engine.interfaces.communicator.Communicator`. A call returns when its work is done."""

    def __init__(self, context: WorkerContext) -> None:
        group = context.group
        assert group is not None
        self._rank = group.rank
        self._size = group.size
        options = dist.ProcessGroupGloo._Options()
        host = "127.0.0.1"
        if os.path.isabs(group.rendezvous):
            store = dist.FileStore(os.path.join(group.rendezvous, "gloo"), group.size)
        else:
            host = context.start.seat.address
            place, _, port = context.start.store.rpartition(":")
            meeting = dist.TCPStore(place, int(port), is_master=False, timeout=LONGEST_WAIT, use_libuv=False)
            store = dist.PrefixStore(group.rendezvous, meeting)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = LONGEST_WAIT
        store.set_timeout(LONGEST_WAIT)
        self._group: Any = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        # A rank is connected before its peers are: one that left now would break their start.
        self.barrier()

    def accepts(self, op: Collective, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
        """Everything of a dtype that gloo knows."""
        return dtype is None or dtype in DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In place. gloo's ring adds each element on one rank and sends the sum round: equal bits on all."""
        x = x.contiguous()
        if x.numel():
            self._living.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """gloo gathers equal shapes: shorter ones are padded on the way."""
        longest = max(sizes)
        if x.shape[dim] < longest:
            padded = x.new_zeros((*x.shape[:dim], longest, *x.shape[dim + 1 :]))
            padded.narrow(dim, 0, x.shape[dim]).copy_(x)
            x = padded
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in sizes]
        if x.numel():
            self._living.allgather([parts], [x]).wait()
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """The whole sum on every rank, then this rank's part: gloo's own knows no unequal parts."""
        return self.all_reduce(x).narrow(dim, sum(sizes[: self._rank]), sizes[self._rank]).contiguous()

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        """gloo's own, along the first dimension."""
        out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
        self._living.alltoall_base(out, x.contiguous(), list(recv_sizes), list(send_sizes)).wait()
        return out

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Through a contiguous copy where `x` is strided."""
        whole = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._living.broadcast([whole], options).wait()
        if whole is not x:
            x.copy_(whole)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Returns when the other rank has it."""
        self.isend(x, to).wait()

    def isend(self, x: torch.Tensor, to: int) -> Sending:
        """gloo's own, which keeps the tensor."""
        sending: Sending = self._living.send([x.contiguous()], to, 0)
        return sending

    def recv(self, x: torch.Tensor, source: int) -> None:
        """Through a contiguous copy where `x` is strided."""
        whole = x.contiguous()
        self._living.recv([whole], source, 0).wait()
        if whole is not x:
            x.copy_(whole)

    def barrier(self) -> None:
        """gloo's own."""
        self._living.barrier().wait()

    def close(self) -> None:
        """The connections end with the group."""
        self._group = None

    @property
    def _living(self) -> Any:
        if self._group is None:
            raise RuntimeError("the communicator is closed")
        return self._group
