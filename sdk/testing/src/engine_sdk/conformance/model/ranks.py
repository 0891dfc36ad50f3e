"""Ranks that share a model, as threads of this process: what each computes, and that all make the same calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from engine.types.parallel import Parallel, Place, places

T = TypeVar("T")
SECONDS = 60.0
"""The longest that a rank waits for the others."""


class _Meeting:
    """Where ranks lay down a tensor each, and see those of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.calls: list[tuple[str, ...] | None] = [None] * size
        self.tensors: list[torch.Tensor | None] = [None] * size

    def swap(self, rank: int, call: tuple[str, ...], x: torch.Tensor | None) -> list[torch.Tensor]:
        """All ranks' tensors; every rank has to make the same call."""
        self.calls[rank], self.tensors[rank] = call, None if x is None else x.clone()
        self.barrier.wait()
        calls, tensors = list(self.calls), [tensor for tensor in self.tensors if tensor is not None]
        self.barrier.wait()
        assert len(set(calls)) == 1, f"ranks make different calls at once: {', '.join(map(str, calls))}"
        return tensors


class ThreadGroup:
    """One rank's hold on the others. Implements `engine.interfaces.communicator.Group`; sums have one order."""

    tokens: Sequence[int] | None = None

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank = rank
        self._meeting = meeting

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = _sum(self._meeting.swap(self._rank, ("all_reduce", str(tuple(x.shape)), str(x.dtype)), x))
        x.fill_(torch.nan)  # used up
        return total

    def all_gather(self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        lengths = [x.shape[dim]] * self.size if sizes is None else list(sizes)
        assert lengths[self._rank] == x.shape[dim], f"rank {self._rank} gathers {list(x.shape)}, of sizes {lengths}"
        call = ("all_gather", str(dim), str(lengths), str(x.dtype))
        return torch.cat(self._meeting.swap(self._rank, call, x), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        lengths = [x.shape[dim] // self.size] * self.size if sizes is None else list(sizes)
        assert sum(lengths) == x.shape[dim], f"{list(x.shape)} is scattered in sizes {lengths}"
        total = _sum(self._meeting.swap(self._rank, ("reduce_scatter", str(tuple(x.shape)), str(lengths)), x))
        x.fill_(torch.nan)  # used up
        return torch.split(total, lengths, dim)[self._rank].contiguous()

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        starts = torch.tensor([0, *send_sizes]).cumsum(0).tolist()
        given = self._meeting.swap(self._rank, ("all_to_all",), x)
        places = self._meeting.swap(self._rank, ("all_to_all, sizes",), torch.tensor(starts))
        mine = [x[p[self._rank] : p[self._rank + 1]] for x, p in zip(given, places, strict=True)]
        assert [len(rows) for rows in mine] == list(recv_sizes), "ranks disagree about how many rows they exchange"
        return torch.cat(mine)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        x.copy_(self._meeting.swap(self._rank, ("broadcast", str(tuple(x.shape)), str(root)), x)[root])

    def send(self, x: torch.Tensor, to: int) -> None:
        raise NotImplementedError("layers that are shared talk by collectives")

    def recv(self, x: torch.Tensor, source: int) -> None:
        raise NotImplementedError("layers that are shared talk by collectives")

    def barrier(self) -> None:
        self._meeting.swap(self._rank, ("barrier",), None)


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What `work` gives on each rank. Raises the first error that is not of a rank left alone."""
    meeting = _Meeting(size)
    return _run([ThreadGroup(rank, meeting) for rank in range(size)], work, [meeting])


def on_places(parallel: Parallel, work: Callable[[int, Place, dict[str, ThreadGroup]], T]) -> list[T]:
    """The same of all workers of all engine cores that share experts: work(core, place, groups), by core, then by rank.
    A model of one layer for each stage."""
    meetings: dict[tuple[int, ...], _Meeting] = {}
    found: list[tuple[int, Place, dict[str, ThreadGroup]]] = []
    for core in range(parallel.dp):
        for place in places(parallel, parallel.pp, core):
            groups = {}
            for name, group in place.groups.items():
                local = core * parallel.world if name in ("tp", "cp", "pp") else 0
                members = tuple(local + member for member in group.members)
                meeting = meetings.setdefault(members, _Meeting(group.size))
                groups[name] = ThreadGroup(group.rank, meeting)
            found.append((core, place, groups))
    return _run(found, lambda one: work(*one), list(meetings.values()))


def _run(ranks: Sequence[Any], work: Callable[[Any], T], meetings: Sequence[_Meeting]) -> list[T]:
    found: list[Any] = [None] * len(ranks)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        torch.set_num_threads(1)
        try:
            found[index] = work(ranks[index])
        except BaseException as error:
            errors.append(error)
            for meeting in meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
