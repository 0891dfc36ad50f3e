"""The half in the core by itself, with workers that read when they are told to: rooms on the host, and who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.types.errors import InvalidRequestError
from engine.types.request import Adapter
from engine_lora import places
from engine_lora.card import LoRAOptions
from engine_lora.places import Places

LORAS, ON_HOST, ADAPTERS = 2, 3, 6
BROKEN = 5
"""The adapter that cannot be read."""


class Host:
    """What the workers hold, as they are told."""

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}
        self.lies: dict[int, str] = {}

    def tell(self, what: str, *args: Any) -> Callable[[], list[Any] | None]:
        """The answers are there the second time that they are asked for."""
        answers, asked = self.told(what, *args), iter((None,))
        return lambda: next(asked, answers)

    def told(self, what: str, *args: Any) -> list[Any]:
        if what == "load":
            assert args[0] not in self.held, "it is read twice"
            self.held[args[0]] = False
        elif what == "drop":
            assert args[0] not in self.lies.values(), "it is dropped, and lies on the device"
            self.held.pop(args[0], None)
        elif what == "place":
            if args[1] is None:
                del self.lies[args[0]]
            else:
                assert self.held[args[1]], "it has a place, and is not read"
                self.lies[args[0]] = args[1]
        elif what == "loaded":
            return [[self._answer(identity) for identity in args[0]]]
        return [None]

    def _answer(self, identity: str) -> Any:
        error = InvalidRequestError("load", "it is broken").parts if identity.startswith(f"a{BROKEN}") else None
        return (self.held[identity], error if self.held[identity] else None, [])


class Waiting:
    """Implements `engine.interfaces.adapter.Adapted`."""

    def __init__(self, number: int, adapter: Adapter | None) -> None:
        self.request_id = str(number)
        self.adapter = adapter
        self.place = 0


class Traffic(RuleBasedStateMachine):
    """Requests come, run, end and give up; adapters are loaded ahead and unloaded; workers read in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host()
        self.now = 0.0
        options = LoRAOptions(max_loras=LORAS, max_cpu_loras=ON_HOST)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.core = Places(SimpleNamespace(options=options, tell=self.host.tell, clock=clock))  # type: ignore[arg-type]
        self.count = 0
        self.running: list[Waiting] = []
        self.waiting: list[Waiting] = []
        self.asked: set[int] = set()

    @staticmethod
    def adapter(number: int) -> Adapter:
        return Adapter(name=f"a{number}", path=f"/{number}", revision="0")

    @rule(number=st.integers(0, ADAPTERS - 1), several=st.sampled_from([1, 1, 40, 300]))
    def comes(self, number: int, several: int) -> None:
        for _ in range(several):  # one after the other: each but the last ends at once
            self.count += 1
            request = Waiting(self.count, self.adapter(number))
            if self.core.begin(request, lambda: None):
                self.waiting.append(request)
                return
            self.running.append(request)
            if several > 1:
                self.ends(-1)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(-1, 99))
    def ends(self, index: int) -> None:
        request = self.running.pop(index % len(self.running))
        self.core.ended(request)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99))
    def gives_up(self, index: int) -> None:
        request = self.waiting.pop(index % len(self.waiting))
        self.core.forget(request)
        self.core.ended(request)

    @rule(number=st.integers(0, ADAPTERS - 1))
    def is_loaded_ahead(self, number: int) -> None:
        self.core.load_adapter(f"a{number}", f"/{number}", "0")
        self.asked.add(number)

    @precondition(lambda self: self.asked)
    @rule()
    def is_asked_about(self) -> None:
        for number in sorted(self.asked):
            loaded, error = self.core.adapter_state(self.adapter(number).identity)
            assert error is None or number == BROKEN
            if loaded or error is not None:
                self.asked.discard(number)

    @rule(number=st.integers(0, ADAPTERS - 1))
    def is_unloaded(self, number: int) -> None:
        identity = self.adapter(number).identity
        used = any(one.adapter is not None and one.adapter.identity == identity for one in self.running + self.waiting)
        assert self.core.unload_adapter(identity) == (not used)

    @rule(several=st.integers(1, 3))
    def is_read(self, several: int) -> None:
        for identity in [identity for identity, read in self.host.held.items() if not read][:several]:
            self.host.held[identity] = True
        self.now += 1.0

    @rule()
    def looks(self) -> None:
        for request, error in self.core.ready():
            self.waiting.remove(request)  # type: ignore[arg-type]
            assert request.adapter is not None
            assert (error is not None) == request.adapter.name.endswith(str(BROKEN))
            if error is None:
                self.running.append(request)  # type: ignore[arg-type]
            else:
                self.core.ended(request)

    @invariant()
    def holds(self) -> None:
        assert len(self.host.held) <= ON_HOST, "more are in the host's memory than there is room for"
        for request in self.running:
            assert request.adapter is not None
            assert self.host.lies[request.place] == request.adapter.identity, "another's place"
        assert not any(request.place for request in self.waiting)
        assert max(Counter(self.host.lies.values()).values(), default=0) <= 1
        assert set(self.host.lies) <= set(range(1, LORAS + 1))

    def teardown(self) -> None:
        """Whoever waits gets through as others end, and then nothing is left."""
        for _ in range(400):
            if not (self.waiting or self.running or self.asked):
                break
            if self.running:
                self.ends(0)
            self.is_read(9)
            self.looks()
            self.is_asked_about()
        assert not self.waiting and not self.asked, "they wait for ever"
        for number in range(ADAPTERS):
            assert self.core.unload_adapter(self.adapter(number).identity)
        assert not self.host.held and not self.host.lies and not self.core._known, "something is left"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_workers_are_asked_seldom_while_they_read() -> None:
    """Each question costs a step its time: two for what is read in 30 ms, and one for several at once."""
    host, now = Host(), [0.0]
    questions = []

    def tell(what: str, *args: Any) -> Any:
        questions.extend([args[0]] if what == "loaded" else [])
        return host.tell(what, *args)

    clock = SimpleNamespace(monotonic=lambda: now[0])
    core = Places(SimpleNamespace(options=LoRAOptions(max_loras=2), tell=tell, clock=clock))  # type: ignore[arg-type]
    requests = [Waiting(number, Traffic.adapter(number)) for number in range(2)]
    for request in requests:
        assert core.begin(request, lambda: None)
    while now[0] < 2.0:  # a loop that turns every millisecond
        now[0] += 0.001
        assert core.ready() == []
    assert len(questions) <= 2.0 / places.LOOK_SECONDS[1] + 6 and all(len(asked) == 2 for asked in questions)
    host.held = dict.fromkeys(host.held, True)
    now[0] += places.LOOK_SECONDS[1]
    assert core.ready() == [], "they are asked, and have not answered"
    assert core.ready() == [], "they are told the places, and have not answered"
    assert [request for request, _ in core.ready()] == requests


def test_nobody_waits_for_the_workers() -> None:
    """They answer when the steps that they have are over: till then whoever can goes on, and nothing is asked twice."""
    host, now, over = Host(), [0.0], [True]
    told = Counter[str]()

    def tell(what: str, *args: Any) -> Callable[[], list[Any] | None]:
        told[what] += 1
        answers = host.told(what, *args)
        return lambda: answers if over[0] else None

    clock = SimpleNamespace(monotonic=lambda: now[0])
    core = Places(SimpleNamespace(options=LoRAOptions(max_loras=2), tell=tell, clock=clock))  # type: ignore[arg-type]
    first, second = (Waiting(number, Traffic.adapter(number)) for number in range(2))
    assert core.begin(first, lambda: None)
    host.held = dict.fromkeys(host.held, True)
    assert [request for request, _ in core.ready()] == [first]
    over[0] = False
    assert core.begin(second, lambda: None)
    host.held = dict.fromkeys(host.held, True)
    for number in range(2, 5):
        now[0] += 1.0
        assert core.ready() == []
        assert not core.begin(Waiting(number, Traffic.adapter(0)), lambda: None), "its adapter lies there"
        assert not core.begin(Waiting(number, None), lambda: None)
    assert told["loaded"] == 2
    over[0] = True
    assert [request for request, _ in core.ready()] == [second]


def test_no_request_computes_with_what_could_not_be_put_into_its_place() -> None:
    """The workers' error is heard before the request is let through."""
    host = Host()

    def tell(what: str, *args: Any) -> Callable[[], list[Any] | None]:
        answers = host.told(what, *args)

        def come() -> list[Any]:
            if what == "place":
                raise RuntimeError("the device is full")
            return answers

        return come

    clock = SimpleNamespace(monotonic=lambda: 0.0)
    core = Places(SimpleNamespace(options=LoRAOptions(max_loras=1), tell=tell, clock=clock))  # type: ignore[arg-type]
    first = Waiting(0, Traffic.adapter(0))
    assert core.begin(first, lambda: None)
    host.held = dict.fromkeys(host.held, True)
    with pytest.raises(RuntimeError, match="full"):
        core.ready()
    assert not first.place


def test_what_goes_wrong_is_heard_also_when_no_adapter_is_known() -> None:
    host = Host()

    def tell(what: str, *args: Any) -> Callable[[], list[Any] | None]:
        answers = host.told(what, *args)

        def come() -> list[Any]:
            if what == "drop":
                raise RuntimeError("the worker cannot drop it")
            return answers

        return come

    clock = SimpleNamespace(monotonic=lambda: 0.0)
    core = Places(SimpleNamespace(options=LoRAOptions(max_loras=1), tell=tell, clock=clock))  # type: ignore[arg-type]
    adapter = Traffic.adapter(0)
    core.load_adapter(adapter.name, adapter.path, adapter.revision)
    assert core.unload_adapter(adapter.identity)
    with pytest.raises(RuntimeError, match="drop it"):
        core.ready()


class Streams:
    """Adapters 0 and 1, which have both places and all room, and of which a request comes before the last one ends."""

    def __init__(self) -> None:
        self.host = Host()
        self.now = 0.0
        self.count = 0
        options = LoRAOptions(max_loras=2, max_cpu_loras=2)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.core = Places(SimpleNamespace(options=options, tell=self.host.tell, clock=clock))  # type: ignore[arg-type]
        self.running: dict[str, list[Any]] = {"a0": [], "a1": []}
        for number in range(2):
            self.comes(number)
        self.turns(1)

    def comes(self, number: int) -> Waiting:
        self.count += 1
        request = Waiting(self.count, Traffic.adapter(number))
        if not self.core.begin(request, lambda: None):
            self.running[f"a{number}"].append(request)
        return request

    def turns(self, count: int) -> list[Any]:
        """-> the requests of others that got through."""
        others = []
        for _ in range(count):
            self.now += 1.0
            self.host.held = dict.fromkeys(self.host.held, True)
            for request, _error in self.core.ready():
                name = request.adapter.name  # type: ignore[union-attr]
                if name in self.running:
                    self.running[name].append(request)
                else:
                    others.append(request)
            for number in range(2):
                self.comes(number)
                if self.running[f"a{number}"]:
                    self.core.ended(self.running[f"a{number}"].pop(0))
        return others


def test_nobody_waits_for_room_for_ever() -> None:
    """Whoever comes for adapters that are there goes before one that is not, some hundred times; then after it."""
    streams = Streams()
    one = streams.comes(2)
    assert streams.turns(places.MOST_PASSED // 4) == [], "nobody was to make way yet"
    assert streams.turns(places.MOST_PASSED) == [one]
    assert streams.host.lies[one.place] == one.adapter.identity  # type: ignore[union-attr]
    streams.core.ended(one)
    streams.turns(3 * places.MOST_PASSED)
    assert all(streams.running.values()), "those that made way have come back"


def test_what_is_loaded_ahead_gets_room_too() -> None:
    streams = Streams()
    streams.core.load_adapter("a2", "/2", "0")
    for _ in range(places.MOST_PASSED):
        streams.turns(1)
        if streams.core.adapter_state(Traffic.adapter(2).identity) == (True, None):
            return
    raise AssertionError("it is never read")


def test_what_nobody_waits_for_any_more_is_not_read() -> None:
    streams = Streams()
    request = streams.comes(2)
    streams.core.forget(request)
    streams.core.ended(request)
    for of_adapter in streams.running.values():
        for one in of_adapter:
            streams.core.ended(one)
    streams.core.ready()
    assert Traffic.adapter(2).identity not in streams.host.held


def test_a_newcomer_goes_behind_those_who_wait_for_room() -> None:
    """Also where room comes free just before it comes."""
    host = Host()
    context: Any = SimpleNamespace(
        options=LoRAOptions(max_loras=1, max_cpu_loras=1), tell=host.tell, clock=SimpleNamespace(monotonic=lambda: 0.0)
    )
    core = Places(context)
    first, second, third = (Waiting(number, Traffic.adapter(number)) for number in range(3))
    assert core.begin(first, lambda: None)
    host.held[Traffic.adapter(0).identity] = True
    core.ready()
    core.ready()
    assert [request for request, _ in core.ready()] == [first]
    assert core.begin(second, lambda: None)
    core.ended(first)
    assert core.begin(third, lambda: None)
    assert list(host.held) == [Traffic.adapter(1).identity]
