"""The body of communicator `pynccl`: every collective, queued on the stream that computes.

Their results are what the next kernel reads, so a stream of their own would only add two waits to each, in a captured
step too. The one thing that waits on the host, a barrier, has its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine_cuda.communicator_pynccl.library import SUM, UINT8, Nccl
from engine_cuda.peers import GRACE, Peers

if TYPE_CHECKING:
    from engine.interfaces.communicator import Collective
    from engine.interfaces.context import WorkerContext
    from engine_cuda.communicator_pynccl.card import PyNcclOptions

logger = logging.getLogger(__name__)

SUMMED = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
"""What NCCL adds up, by its numbers (ncclDataType_t). What is only moved goes as bytes, whatever it is."""
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})
LINGER = 1.0
"""Seconds that a rank which closes waits for the others to do so: they may still read its memory."""


class PyNcclBody:
    """See `engine.interfaces.communicator.Communicator`. A call returns when its work is queued.

    Where a rank was lost, NCCL is told to give up what is queued, and the next call raises.
    """

    def __init__(self, context: WorkerContext) -> None:
        group = context.group
        assert group is not None
        options: PyNcclOptions = context.options
        self._rank = group.rank
        self._size = group.size
        self._gone = ""
        self._device = context.device or torch.device("cuda", torch.cuda.current_device())
        self._peers = Peers(group.rendezvous, "nccl", self._rank, self._size, options.timeout)
        try:
            self._nccl = Nccl(
                self._rank, self._size, self._peers.exchange, self._make_current, self._peers.gone, options.timeout,
                self._bindings(),
            )  # fmt: skip
        except BaseException:
            self._peers.close()
            raise
        self._peers.watch(self._lost, self._release)
        self._open_side()
        self.barrier()

    # -- the device: what a test puts others in the place of -----------------------------------------------------------
    def _bindings(self) -> Any:
        return None

    def _make_current(self) -> None:
        torch.cuda.set_device(self._device)

    def _open_side(self) -> None:
        self._side = torch.cuda.Stream(self._device)
        self._token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    # -- collectives ---------------------------------------------------------------------------------------------------
    def accepts(self, op: Collective, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
        """Everything, but for sums of what NCCL does not add up."""
        return op not in REDUCTIONS or dtype in SUMMED

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In place where `x` is contiguous."""
        x = x.contiguous()
        if x.numel():
            self._call("all_reduce", x.data_ptr(), x.data_ptr(), x.numel(), SUMMED[x.dtype], SUM)
        return x

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Even parts by NCCL's own, others by one broadcast from each rank, all at once."""
        x = x.contiguous()
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        others = before.numel() * after.numel()
        parts = x.new_empty(sum(sizes) * others)
        self._gather(x, [size * others for size in sizes], parts)
        if before.numel() == 1:
            return parts.view(*before, sum(sizes), *after)
        if len(set(sizes)) == 1:
            whole = parts.view(self._size, *x.shape).movedim(0, dim)
            return whole.reshape(*before, sum(sizes), *after).contiguous()
        split = parts.split([size * others for size in sizes])
        return torch.cat([p.view(*before, s, *after) for p, s in zip(split, sizes, strict=True)], dim)

    def _gather(self, x: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
        """Every rank's counts[rank] elements, one after the other."""
        if len(set(counts)) == 1:
            if x.numel():
                self._call("all_gather", x.data_ptr(), out.data_ptr(), x.nbytes, UINT8)
            return
        with self._nccl.group():
            start = out.data_ptr()
            for rank, count in enumerate(counts):
                nbytes = count * x.itemsize
                if nbytes:
                    source = x.data_ptr() if rank == self._rank else start
                    self._call("broadcast", source, start, nbytes, UINT8, rank)
                start += nbytes

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Even parts by NCCL's own, others by one sum to each rank, all at once."""
        x = x.movedim(dim, 0).contiguous()
        row, kind = x[:1].numel() if len(x) else 0, SUMMED[x.dtype]
        out = x.new_empty((sizes[self._rank], *x.shape[1:]))
        if row and len(set(sizes)) == 1:
            self._call("reduce_scatter", x.data_ptr(), out.data_ptr(), out.numel(), kind, SUM)
        elif row:
            with self._nccl.group():
                start = x.data_ptr()
                for rank, size in enumerate(sizes):
                    if size:
                        to = out.data_ptr() if rank == self._rank else start
                        self._call("reduce", start, to, size * row, kind, SUM, rank)
                    start += size * row * x.itemsize
        return out.movedim(0, dim).contiguous()

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        """Sends and receipts at once; its own rows a rank copies."""
        x = x.contiguous()
        out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
        parts, places = x.split(list(send_sizes)), out.split(list(recv_sizes))
        places[self._rank].copy_(parts[self._rank])
        with self._nccl.group():
            for other in range(self._size):
                if other != self._rank and parts[other].numel():
                    self._call("send", parts[other].data_ptr(), parts[other].nbytes, UINT8, other)
                if other != self._rank and places[other].numel():
                    self._call("recv", places[other].data_ptr(), places[other].nbytes, UINT8, other)
        return out

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Through a contiguous copy where `x` is strided."""
        whole = x.contiguous()
        if whole.numel():
            self._call("broadcast", whole.data_ptr(), whole.data_ptr(), whole.nbytes, UINT8, root)
        if whole is not x:
            x.copy_(whole)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Returns when it is queued."""
        x = x.contiguous()
        if x.numel():
            self._call("send", x.data_ptr(), x.nbytes, UINT8, to)

    def recv(self, x: torch.Tensor, source: int) -> None:
        """Through a contiguous copy where `x` is strided."""
        whole = x.contiguous()
        if whole.numel():
            self._call("recv", whole.data_ptr(), whole.nbytes, UINT8, source)
        if whole is not x:
            x.copy_(whole)

    def barrier(self) -> None:
        """The host waits until every rank has called it; what is queued goes on. In a step that is being captured the
        queue waits instead."""
        if torch.cuda.is_current_stream_capturing():
            self._call("all_reduce", self._token.data_ptr(), self._token.data_ptr(), 1, UINT8, SUM)
            return
        event = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            self._call("all_reduce", self._token.data_ptr(), self._token.data_ptr(), 1, UINT8, SUM)
            event.record()
        while not event.query():
            self._nccl.check()
            time.sleep(0.00002)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._gone:
            raise RuntimeError(self._gone)
        self._nccl.call(name, *arguments, stream=self._stream())

    # -- ends ----------------------------------------------------------------------------------------------------------
    def _lost(self, why: str) -> None:
        """On the watching thread, as `_release`."""
        self._gone = why

    def _release(self) -> None:
        try:
            self._nccl.abort(self._gone)
        except RuntimeError as error:
            logger.warning("after %s: %s", self._gone, error)

    def _drain(self) -> None:
        """Wait for what is queued, but not for ever."""
        event, deadline = torch.cuda.Event(), time.monotonic() + GRACE
        event.record(torch.cuda.current_stream(self._device))
        while not event.query() and time.monotonic() < deadline:
            time.sleep(0.0005)

    def close(self) -> None:
        """What is queued ends first, and the others' last reads of this rank's memory, or a few seconds pass."""
        if self._gone == "the communicator is closed":
            return
        if not self._gone:
            self._drain()
        self._gone = "the communicator is closed"
        self._peers.close(LINGER)
        self._release()
