"""A group of ranks: each collective goes to the first of its communicators that accepts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.interfaces.communicator import ANY_LENGTH, Collective, Communicator, Sending
from engine.types.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch


class ProcessGroup:
    """Implements `engine.interfaces.communicator.Group`.

    Who takes a collective of a form (operation, shape, dtype) is asked once and kept. All ranks decide alike, because
    `accepts` is a pure function of the form, which is equal on all of them.

    Args:
        rank, size: this worker's place.
        communicators: in order of preference; none for one rank.

    Raises ConfigError: several ranks, and no communicator.
    """

    def __init__(self, rank: int, size: int, communicators: Sequence[Communicator] = ()) -> None:
        if not 0 <= rank < size or (size > 1 and not communicators):
            raise ConfigError(
                f"make rank {rank} of a group of {size}",
                f"{len(communicators)} communicators were chosen for it",
                "name one with --communicator",
            )
        self.rank = rank
        self.size = size
        self.tokens: Sequence[int] | None = None
        self._communicators = tuple(communicators)
        self._takers: dict[tuple[Collective, tuple[int, ...], torch.dtype | None], Communicator] = {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else self._taker("all_reduce", tuple(x.shape), x.dtype).all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        if self.size == 1:
            return x
        dim %= x.dim()
        sizes = [x.shape[dim]] * self.size if sizes is None else sizes
        assert len(sizes) == self.size and sizes[self.rank] == x.shape[dim]
        whole = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
        return self._taker("all_gather", whole, x.dtype).all_gather(x, dim, sizes)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        if self.size == 1:
            return x
        dim %= x.dim()
        sizes = [x.shape[dim] // self.size] * self.size if sizes is None else sizes
        assert len(sizes) == self.size and sum(sizes) == x.shape[dim]
        return self._taker("reduce_scatter", tuple(x.shape), x.dtype).reduce_scatter(x, dim, sizes)

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        if self.size == 1:
            return x
        assert len(send_sizes) == len(recv_sizes) == self.size and sum(send_sizes) == len(x)
        taker = self._taker("all_to_all", (ANY_LENGTH, *x.shape[1:]), x.dtype)
        return taker.all_to_all(x, send_sizes, recv_sizes)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        if self.size > 1:
            self._taker("broadcast", tuple(x.shape), x.dtype).broadcast(x, root)

    def send(self, x: torch.Tensor, to: int) -> None:
        self._taker("send", tuple(x.shape), x.dtype).send(x, self._other(to))

    def isend(self, x: torch.Tensor, to: int) -> Sending | None:
        """Send `x` without waiting for the other rank, where the driver can; None where it has been sent."""
        taker = self._taker("send", tuple(x.shape), x.dtype)
        isend: Callable[[torch.Tensor, int], Sending] | None = getattr(taker, "isend", None)
        if isend is None:
            taker.send(x, self._other(to))
            return None
        return isend(x, self._other(to))

    def recv(self, x: torch.Tensor, source: int) -> None:
        self._taker("recv", tuple(x.shape), x.dtype).recv(x, self._other(source))

    def barrier(self) -> None:
        if self.size > 1:
            self._taker("barrier", (), None).barrier()

    def close(self) -> None:
        """Close the communicators. Idempotent."""
        for communicator in self._communicators:
            communicator.close()

    def _other(self, rank: int) -> int:
        assert 0 <= rank < self.size and rank != self.rank, f"rank {self.rank} of {self.size} cannot reach {rank}"
        return rank

    def _taker(self, op: Collective, shape: tuple[int, ...], dtype: torch.dtype | None) -> Communicator:
        form = (op, shape, dtype)
        taker = self._takers.get(form)
        if taker is None:
            taker = next((c for c in self._communicators if c.accepts(op, shape, dtype)), None)
            if taker is None:
                raise EngineError(
                    f"{op} of {list(shape)} in {dtype} over {self.size} ranks",
                    "no communicator accepts it: " + ", ".join(type(c).__name__ for c in self._communicators),
                    "name another with --communicator",
                )
            self._takers[form] = taker
        return taker
