"""Point `scheduling_policy`: the order of the waiting queue, and who is preempted. Major 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.plugin import Card

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext


class SchedulingPolicyCard(Card):
    """Describes a policy. Needs nothing of the device: `unsupported` gets None."""

    orders_by_priority: bool = False
    """Whether `Schedulable.priority` counts. Where it does not, requests that name one are refused."""


class Schedulable(Protocol):
    """What a policy may know of a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def priority(self) -> int:
        """The user's; lower values are more urgent, 0 where the request names none."""

    @property
    def arrival_time(self) -> float:
        """Seconds since the epoch, by a clock that is never set back."""

    @property
    def num_tokens(self) -> int:
        """Known so far, prompt and output."""


RequestT = TypeVar("RequestT", bound=Schedulable)


class SchedulingPolicy(Protocol[RequestT]):
    """The waiting queue in some order. Every method's cost must not grow with the queue's length (log n is fine)."""

    def __init__(self, context: CoreContext) -> None: ...

    def push(self, request: RequestT) -> None:
        """A new request arrives."""

    def push_front(self, request: RequestT) -> None:
        """A request that was preempted, or that could not be placed, goes back before those that came after it."""

    def peek(self) -> RequestT | None:
        """The next request, which stays in the queue; None when it is empty."""

    def pop(self) -> RequestT:
        """Take the request that `peek` shows. Raises IndexError when the queue is empty."""

    def remove(self, request: RequestT) -> None:
        """Take out a request that was aborted. Raises KeyError where it is not queued."""

    def victim(self, running: Sequence[RequestT], pages: Sequence[int]) -> RequestT:
        """The running request to preempt.

        Args:
            running: at least one, in order of admission.
            pages: for each of them the KV pages that would come free: those that no other request holds. Where it is 0
                for one, nothing is won by preempting that one alone.
        """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestT]:
        """All waiting requests, in no stated order."""
