"""Point `communicator`: collectives between the ranks of a group. Several drivers, in order: for each collective the
first that accepts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from engine.interfaces.platform import STREAM
from engine.plugin import Card

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier"
]  # fmt: skip

ANY_LENGTH = -1
"""Stands in a shape where ranks differ."""


@dataclass(frozen=True, kw_only=True)
class CommunicatorNeed:
    """What the engine asks of a communicator.

    Args:
        world_size: ranks of the group; of several groups, of the largest.
        num_nodes: machines on which they run; unknown (1) when an engine starts, and asked again by each worker.
        device: torch's device string, where tensors lie.
        framework: "torch" or "jax".
        batch_invariant: a row's results have to have the same bits in every batch, see `engine.plugin.Card`.
    """

    world_size: int
    device: str
    framework: str = "torch"
    batch_invariant: bool = False
    num_nodes: int = 1


class CommunicatorCard(Card):
    """Describes a communicator. `captured_by` names the recorders (`PlatformCard.recorder`) that see what it does."""

    captured_by: frozenset[str] = STREAM


class Sending(Protocol):
    """A tensor on its way to another rank. Whoever sends holds on to this until `wait` returns, or it may be lost."""

    def wait(self) -> object:
        """Return when the other rank has it, and the tensor may change. Raises RuntimeError where that rank has
        gone."""


class Communicator(Protocol):
    """Collectives between all ranks of a group, at work.

    Built with a `WorkerContext`, on every rank of the group at once: its `group` says which rank this is, of how many,
    and names a private directory, empty at first, that the ranks of this group alone share to find each other. On
    several machines it is a prefix of names in the store `context.start.store` instead, and no absolute path. A worker
    may be in several groups; each has a body of its own.

    Every rank makes the same calls in the same order. Tensors are dense and on the group's device; a call may return
    before the work is done where the device has a queue, in order with what is queued after it. Results are equal on
    all ranks that get the same, bit by bit.

    A call raises RuntimeError where another rank has gone, also one that only receives. Where the device has a queue,
    this may be a later call: what is queued ends soon then, without a result of use, and does not wait for ever.
    """

    def __init__(self, context: WorkerContext) -> None: ...

    def accepts(self, op: Collective, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
        """Whether this driver takes a collective. Pure, and of these arguments alone, so that all ranks agree; fixed
        once a step is captured.

        shape: of the tensor that all ranks know alike: the input of all_reduce, broadcast, send and recv; the whole,
        gathered or to be scattered, of all_gather and reduce_scatter; the input of all_to_all, whose first dimension is
        `ANY_LENGTH`. A barrier has () and no dtype.
        """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. May be written into `x`, which is used up."""

    def all_gather(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """All ranks' tensors, one after the other along `dim`, where rank r's has length sizes[r]. Contiguous."""

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """This rank's part, sizes[rank] long along `dim`, of the sum over ranks. `x` is used up."""

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor:
        """Rank r gets the next send_sizes[r] rows of `x`; the answer is the rows of all ranks for this one, in order
        of rank, recv_sizes[r] from each."""

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Fill `x` with root's."""

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send `x`, which must not change until the other rank has it, to one rank, which calls `recv`.

        A driver may have `isend(x, to) -> Sending` beside it, which returns at once, whether the other rank has called
        `recv` or not. Without it `send` is called in its place.
        """

    def recv(self, x: torch.Tensor, source: int) -> None:
        """Fill `x` with what one rank sends."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def close(self) -> None:
        """Let go of connections and memory, without asking the other ranks. Idempotent.

        A collective that this rank calls afterwards raises RuntimeError. For the other ranks it has gone, see above,
        also while its process lives on.
        """


class Group(Protocol):
    """The ranks that work together, as layers see them: each call goes to the first communicator that accepts it.

    With one rank every call gives back its input, and no communicator exists.

    Attributes:
        tokens: where ranks of several engine cores step together ("dp"): the most tokens that each has in this step;
            None: as many as this one.
    """

    tokens: Sequence[int] | None

    @property
    def rank(self) -> int:
        """This worker's place, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`, as for the others."""

    def all_gather(self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """sizes: None where all ranks' lengths along `dim` are equal."""

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """sizes: None divides `dim` evenly, which must go."""

    def all_to_all(self, x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> torch.Tensor: ...

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None: ...

    def send(self, x: torch.Tensor, to: int) -> None: ...

    def recv(self, x: torch.Tensor, source: int) -> None: ...

    def barrier(self) -> None: ...
