"""The suite of point `scheduling_policy`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.interfaces.scheduling_policy import Schedulable, SchedulingPolicy, SchedulingPolicyCard
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.core_contexts import core_context
from engine_sdk.conformance.timing import median_seconds


class Waiting:
    """A request as a policy sees it; it counts how often it is looked at."""

    __slots__ = ("_facts", "looks")

    def __init__(self, request_id: str, priority: int = 0, arrival_time: float = 0.0, num_tokens: int = 8) -> None:
        self._facts = (request_id, priority, arrival_time, num_tokens)
        self.looks = 0

    def _look(self, place: int) -> Any:
        self.looks += 1
        return self._facts[place]

    @property
    def request_id(self) -> str:
        """Unique."""
        return cast(str, self._look(0))

    @property
    def priority(self) -> int:
        """The user's."""
        return cast(int, self._look(1))

    @property
    def arrival_time(self) -> float:
        """Seconds."""
        return cast(float, self._look(2))

    @property
    def num_tokens(self) -> int:
        """Known so far."""
        return cast(int, self._look(3))

    def __eq__(self, other: object) -> bool:
        self.looks += 1
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Waiting{self._facts}"


class SchedulingPolicyConformance(Conformance):
    """Nothing is lost or given twice, `peek` shows what `pop` takes, and no method looks at the whole queue."""

    point = "scheduling_policy"
    protocol = "SchedulingPolicy"

    @classmethod
    def needs(cls) -> Sequence[None]:
        return [None]

    @classmethod
    def make(cls) -> SchedulingPolicy[Schedulable]:
        """An empty queue."""
        return cls.body()(core_context(cls.subject()))  # type: ignore[no-any-return]

    def test_an_empty_queue(self) -> None:
        """None to peek at, IndexError to pop, KeyError to remove."""
        queue, stranger = self.make(), Waiting("a")
        assert queue.peek() is None and len(queue) == 0 and list(queue) == []
        with pytest.raises(IndexError):
            queue.pop()
        with pytest.raises(KeyError):
            queue.remove(stranger)
        queue.push(stranger)
        assert queue.pop() is stranger
        with pytest.raises(KeyError):
            queue.remove(stranger)

    def test_equals_go_in_order_of_arrival(self) -> None:
        """Requests that differ in nothing but when they came."""
        queue, requests = self.make(), [Waiting(f"{i * 7 % 50}", arrival_time=float(i)) for i in range(50)]
        for request in requests:
            queue.push(request)
        assert [queue.pop() for _ in requests] == requests

    def test_what_goes_back_is_next(self) -> None:
        """A request that was just taken, and could not be placed, is the next one again."""
        queue = self.make()
        for i in range(30):
            queue.push(Waiting(str(i), priority=i % 3, arrival_time=float(i), num_tokens=1 + i * 5 % 11))
        while len(queue) > 1:
            request = queue.pop()
            queue.push_front(request)
            assert queue.peek() is request and queue.pop() is request

    def test_what_goes_back_goes_before_those_that_came_after(self) -> None:
        """A preempted request is before its equals, and of several the last that went back."""
        queue = self.make()
        first, second, third = (Waiting(str(i), arrival_time=float(i)) for i in range(3))
        queue.push(third)
        queue.push_front(second)
        queue.push_front(first)
        assert [queue.pop() for _ in range(3)] == [first, second, third]

    def test_urgent_requests_go_first(self) -> None:
        """Where the card says that priorities count: of requests that came together the lowest value goes first, and is
        preempted last."""
        card = cast("type[SchedulingPolicyCard]", self.subject().card)
        if not card.orders_by_priority:
            not_served("the card's orders_by_priority is False")
        queue, requests = self.make(), [Waiting(str(i), priority=i * 7 % 20 - 5) for i in range(20)]
        for request in requests:
            queue.push(request)
        assert [queue.pop().priority for _ in requests] == sorted(request.priority for request in requests)
        assert queue.victim(requests, [1] * len(requests)).priority == max(request.priority for request in requests)

    def test_victims(self) -> None:
        """One of those that run, the same when asked again; the queue does not change."""
        queue, waiting = self.make(), Waiting("waiting")
        queue.push(waiting)
        for n in range(1, 20):
            running = [Waiting(f"{n} {i}", i * 7 % 5 - 2, float(i), 1 + i * 3 % 7) for i in range(n)]
            pages = [i * 5 % 3 for i in range(n)]
            victim = queue.victim(tuple(running), tuple(pages))
            assert any(victim is request for request in running)
            assert queue.victim(tuple(running), tuple(pages)) is victim
        assert len(queue) == 1 and queue.peek() is waiting

    def test_cost_does_not_grow_with_the_queue(self) -> None:
        """Counted in looks at requests, not in seconds: log n is fine, n is not."""
        looks: dict[int, list[float]] = {}
        for n in (200, 12_800):
            queue, requests = self.make(), [Waiting(str(i), i * 7 % 5, float(i), 1 + i % 97) for i in range(n)]
            for request in requests:
                queue.push(request)
            looks[n] = []
            for work in (queue.peek, lambda queue=queue: queue.push_front(queue.pop()), queue.pop):
                before = _looks(requests)
                for _ in range(20):
                    work()
                looks[n].append((_looks(requests) - before) / 20)
            before, kept = _looks(requests), list(queue)
            listed = _looks(requests) - before
            for waiting in kept[len(kept) // 2 :][:20]:
                queue.remove(waiting)
            looks[n].append((_looks(requests) - before - listed) / 20)
        for name, few, many in zip(("peek", "push_front and pop", "pop", "remove"), *looks.values(), strict=True):
            allowed = 4 * (few + 1) + 8 * math.log2(12_800)
            assert many <= allowed, f"{name} looks at {many:.0f} requests of 12,800, at {few:.0f} of 200"

    def test_any_sequence_of_calls(self) -> None:
        """Pushes, pops and removals in any order."""
        make = self.make

        class Machine(_PolicyCalls):
            def make(self) -> SchedulingPolicy[Schedulable]:
                return make()

        run_state_machine_as_test(Machine, settings=self.hypothesis_settings(60, stateful_step_count=40))

    @classmethod
    def figure(cls) -> str | None:
        """What a request costs on its way through a long queue."""
        queue, requests = cls.make(), [Waiting(str(i), i % 3, float(i)) for i in range(10_000)]
        for request in requests[:-1]:
            queue.push(request)
        last = [requests[-1]]

        def turn() -> None:
            queue.push(last[0])
            queue.peek()
            last[0] = cast(Waiting, queue.pop())

        return f"push, peek and pop at 10,000 waiting: {median_seconds(turn) * 1e6:.2f} us"


class _PolicyCalls(RuleBasedStateMachine):
    """The scheduler's side."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.make()
        self.twin = self.make()
        self.waiting: dict[str, Waiting] = {}
        self.count = 0

    def make(self) -> SchedulingPolicy[Schedulable]:
        """An empty queue."""
        raise NotImplementedError

    @rule(
        priority=st.integers(-2, 2),
        later=st.sampled_from([0.0, 0.5, 2.0]),
        tokens=st.integers(1, 9),
        front=st.booleans(),
    )
    def push(self, priority: int, later: float, tokens: int, front: bool) -> None:
        """A request arrives, or comes back."""
        self.count += 1
        request = Waiting(f"r{self.count * 7919 % 1000}-{self.count}", priority, self.count / 4 + later, tokens)
        for queue in (self.queue, self.twin):
            (queue.push_front if front else queue.push)(request)
        self.waiting[request.request_id] = request

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        """The one that `peek` shows."""
        shown, taken, other = self.queue.peek(), self.queue.pop(), self.twin.pop()
        assert taken is shown, f"peek shows {shown!r}, pop takes {taken!r}"
        assert other is taken, "the same calls in the same order take another request"
        assert self.waiting.pop(taken.request_id, None) is taken, f"{taken!r} is not waiting"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """An abort."""
        request = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.queue.remove(request)
        self.twin.remove(request)

    @invariant()
    def everyone_is_there(self) -> None:
        """Each once."""
        assert len(self.queue) == len(self.waiting)
        listed = [cast(Waiting, request) for request in self.queue]
        assert len(listed) == len(self.waiting) and {id(r) for r in listed} == {id(r) for r in self.waiting.values()}
        assert (self.queue.peek() is None) == (not self.waiting)


def _looks(requests: Sequence[Waiting]) -> int:
    return sum(request.looks for request in requests)
