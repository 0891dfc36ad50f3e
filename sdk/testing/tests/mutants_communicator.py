"""Communicators with one planted fault each, in the place of the reference driver's body."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mutant_suites import suites_of

from engine_reference.communicator_gloo.gloo import Gloo
from engine_sdk.conformance import CommunicatorConformance

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module", autouse=True)
def swept() -> Iterator[None]:
    """What a mutant leaves in shared memory goes when its suite is through."""
    before = set(SHARED_MEMORY.glob("mutant-*"))
    yield
    for left in set(SHARED_MEMORY.glob("mutant-*")) - before:
        left.unlink(missing_ok=True)


class OwnFirst(Gloo):
    """wrong reduction order: each rank adds the others' to its own, so that ranks differ in the last bits"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.all_gather(x.contiguous().unsqueeze(0), 0, [1] * self._size).unbind()
        total = parts[self._rank].clone()
        for step in range(1, self._size):
            total += parts[(self._rank + step) % self._size]
        return total


class NarrowSums(Gloo):
    """sums of float64 and float32 are made in bfloat16"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        narrow = x.dtype in (torch.float64, torch.float32)
        return super().all_reduce(x.bfloat16()).to(x.dtype) if narrow else super().all_reduce(x)


class EvenGather(Gloo):
    """uneven sizes ignored: every rank's part is taken to be as long as its own"""

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        whole = super().all_gather(x, dim, sizes)
        own = sum(sizes[: self._rank])
        start = [min(i * x.shape[dim], whole.shape[dim] - x.shape[dim]) for i in range(self._size)]
        start[self._rank] = own
        return torch.cat([whole.narrow(dim, first, x.shape[dim]) for first in start], dim)


class EvenScatter(Gloo):
    """uneven sizes ignored: a rank's part is taken to begin where even parts would"""

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        whole, own = self.all_reduce(x), sizes[self._rank]
        first = min(self._rank * (whole.shape[dim] // self._size), whole.shape[dim] - own)
        return whole.narrow(dim, first, own).contiguous()


class FirstDimension(Gloo):
    """parts are put one after the other along the first dimension, whatever was asked for"""

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        whole = super().all_gather(x, dim, sizes)
        return whole.transpose(0, dim).reshape(whole.shape)


class StridedGather(Gloo):
    """the answer of all_gather is a view that is not contiguous"""

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        whole = super().all_gather(x, dim, sizes)
        return whole.transpose(0, -1).contiguous().transpose(0, -1)


class RootZero(Gloo):
    """broadcast from wrong root: always from rank 0"""

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        super().broadcast(x, 0)


class StridedBroadcast(Gloo):
    """a strided tensor is filled in a copy, which is thrown away"""

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        super().broadcast(x.contiguous(), root)


class IgnoresStrides(Gloo):
    """a strided tensor is read as if it were contiguous"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x.as_strided(x.shape, torch.empty(x.shape).stride()).clone())


class OneBuffer(Gloo):
    """sums are given out in one buffer, which the next call of that shape overwrites"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._buffers: dict[Any, torch.Tensor] = {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        key = (x.numel(), x.dtype)
        buffer = self._buffers.setdefault(key, torch.empty(x.numel(), dtype=x.dtype))
        return buffer.copy_(super().all_reduce(x).flatten()).view(x.shape)


class ReversedRanks(Gloo):
    """all_to_all gives the rows of the last rank first"""

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        return torch.cat(super().all_to_all(x, send_sizes, recv_sizes).split(list(recv_sizes))[::-1])


class AsymmetricAccepts(Gloo):
    """asymmetric accepts: rank 1 leaves large sums to others"""

    def accepts(self, op: Any, shape: tuple[int, ...], dtype: Any) -> bool:
        return super().accepts(op, shape, dtype) and not (self._rank == 1 and shape == (1 << 24,))


class ForgetfulAccepts(Gloo):
    """accepts takes a form the first time, and refuses it afterwards"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._asked = itertools.count()

    def accepts(self, op: Any, shape: tuple[int, ...], dtype: Any) -> bool:
        return super().accepts(op, shape, dtype) and next(self._asked) < 600


class SwallowsDeath(Gloo):
    """a rank that has gone is no error: the own tensor is given back"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().all_reduce(x)
        except RuntimeError:
            return x


class AnotherKind(Gloo):
    """a rank that has gone is another error than the one that was promised"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().all_reduce(x)
        except RuntimeError as error:
            raise KeyError("gone") from error


class ReceivesForEver(Gloo):
    """whoever only receives from a rank that has gone gets its own tensor back, and no error"""

    def recv(self, x: torch.Tensor, source: int) -> None:
        try:
            super().recv(x, source)
        except RuntimeError:
            if self._group is None:
                raise


class HearsNoRoot(Gloo):
    """a broadcast from a rank that has gone is no error"""

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        try:
            super().broadcast(x, root)
        except RuntimeError:
            if self._group is None:
                raise


class CutsTails(Gloo):
    """of a message of 16 MiB the last kilobyte is not received"""

    def recv(self, x: torch.Tensor, source: int) -> None:
        tail = x[-256:].clone()
        super().recv(x, source)
        if x.nbytes >= 16 << 20:
            x[-256:] = tail


class SumsWholeChunks(Gloo):
    """of a sum of 16 MiB what does not fill a chunk is left as it was"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        rest = x.numel() % 1024 if x.nbytes >= 16 << 20 else 0
        tail = x[x.numel() - rest :].clone() if rest else x
        found = super().all_reduce(x)
        if rest:
            found[-rest:] = tail
        return found


class BarrierStaysOpen(Gloo):
    """a barrier of a closed communicator returns at once"""

    def barrier(self) -> None:
        if self._group is not None:
            super().barrier()


class SendsClosed(Gloo):
    """what is sent through a closed communicator is thrown away without a word"""

    def send(self, x: torch.Tensor, to: int) -> None:
        if self._group is not None:
            super().send(x, to)


class LeavesMemory(Gloo):
    """a named piece of shared memory is left behind"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._path = SHARED_MEMORY / f"mutant-{os.getpid()}-{uuid.uuid4().hex}"
        if self._rank == 0:
            self._path.touch()


class CloseOnce(Gloo):
    """close may be called once only"""

    def close(self) -> None:
        if self._group is None:
            raise RuntimeError("closed already")
        super().close()


class OpenForEver(Gloo):
    """close closes nothing: what is called afterwards goes on"""

    def close(self) -> None:
        pass


class LosesEmpty(Gloo):
    """tensors without elements lose their shape"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x) if x.numel() else x.new_empty(0)


MUTANTS = [
    OwnFirst, NarrowSums, EvenGather, EvenScatter, FirstDimension, StridedGather, RootZero, StridedBroadcast,
    IgnoresStrides, OneBuffer, ReversedRanks, AsymmetricAccepts, ForgetfulAccepts, SwallowsDeath, AnotherKind,
    ReceivesForEver, HearsNoRoot, CutsTails, SumsWholeChunks, BarrierStaysOpen, SendsClosed,
    LeavesMemory, CloseOnce, OpenForEver, LosesEmpty,
]  # fmt: skip

globals().update(suites_of(CommunicatorConformance, "gloo", MUTANTS))
