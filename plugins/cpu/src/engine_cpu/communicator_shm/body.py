"""The body of communicator `shm`: tensors to addresses, for the native group."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine_cpu._native import ShmGroup, shm_bytes
from engine_cpu.communicator_shm.meeting import meet
from engine_cpu.dtypes import DTYPES

if TYPE_CHECKING:
    from engine.interfaces.communicator import Collective
    from engine.interfaces.context import WorkerContext

LONGEST_WAIT = 3600.0
"""Seconds, for ranks that are slow to load or to compute. One that has gone is noticed within a tenth of a second."""


class Shm:
    """See `engine.interfaces.communicator.Communicator`. A call returns when its work is done.

    Sums are made in order of rank, of 16-bit floats in float32, and each on one rank or on all alike: the same bits
    everywhere.
    """

    def __init__(self, context: WorkerContext) -> None:
        group = context.group
        assert group is not None
        self._rank = group.rank
        self._size = group.size
        memory, peers = meet(group.rendezvous, group.rank, group.size, shm_bytes(group.size), LONGEST_WAIT)
        try:
            self._group = ShmGroup(memory, group.rank, group.size, peers, LONGEST_WAIT)
        finally:
            os.close(memory)
        self.barrier()

    def accepts(self, op: Collective, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
        """Everything of a dtype that the native module knows."""
        return dtype is None or dtype in DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In place where `x` is contiguous."""
        x = x.contiguous()
        self._group.all_reduce(x.data_ptr(), x.numel(), DTYPES[x.dtype])
        return x

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Every rank's part goes to its place at once, whatever the dimension."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))
        self._group.all_gather(x.data_ptr(), out.data_ptr(), *_frame(x, dim), sizes)
        return out

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Each rank adds up its own part alone."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:dim], sizes[self._rank], *x.shape[dim + 1 :]))
        self._group.reduce_scatter(x.data_ptr(), out.data_ptr(), *_frame(x, dim), sizes, DTYPES[x.dtype])
        return out

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        """Along the first dimension."""
        x = x.contiguous()
        out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
        row = math.prod(x.shape[1:]) * x.itemsize
        send, recv = [size * row for size in send_sizes], [size * row for size in recv_sizes]
        self._group.all_to_all(x.data_ptr(), out.data_ptr(), send, recv)
        return out

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Through a contiguous copy where `x` is strided."""
        whole = x.contiguous()
        self._group.broadcast(whole.data_ptr(), whole.nbytes, root)
        if whole is not x:
            x.copy_(whole)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Returns when the other rank has it, but for what its mailbox holds."""
        x = x.contiguous()
        self._group.send(x.data_ptr(), x.nbytes, to)

    def recv(self, x: torch.Tensor, source: int) -> None:
        """Through a contiguous copy where `x` is strided."""
        whole = x.contiguous()
        self._group.recv(whole.data_ptr(), whole.nbytes, source)
        if whole is not x:
            x.copy_(whole)

    def barrier(self) -> None:
        """One round without data."""
        self._group.barrier()

    def close(self) -> None:
        """The memory is let go, and the other ranks notice."""
        self._group.close()


def _frame(x: torch.Tensor, dim: int) -> tuple[int, int]:
    """Elements before `dim`, and bytes of one index of it."""
    return math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :]) * x.itemsize
