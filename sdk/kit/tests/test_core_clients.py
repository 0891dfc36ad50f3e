"""Whom an engine core tells what, when several clients ask it."""

from __future__ import annotations

from engine.types.messages import Attach, FromCore
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest, FinishReason
from engine_kit.core_clients import STATE_SECONDS, Clients


class Sockets:
    """All that a book of clients talks to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.heard: list[str] = []
        self.told: dict[str, list[FromCore]] = {"parent": []}
        self.dropped: list[str] = []
        self.clients = Clients(self, Sink(self, "parent"), self.sink, lambda: self.now)

    def bind(self, address: str) -> None:
        if address == "gone":
            raise FileNotFoundError(address)
        self.heard.append(address)

    def unbind(self, address: str) -> None:
        self.heard.remove(address)

    def sink(self, address: str) -> Sink:
        self.told[address] = []
        return Sink(self, address)

    def take(self) -> dict[str, list[CoreOutputs]]:
        """What each was told since the last call; who was told nothing is left out."""
        told = {name: messages[:] for name, messages in self.told.items() if messages}
        for messages in self.told.values():
            messages.clear()
        return told  # type: ignore[return-value]


class Sink:
    def __init__(self, sockets: Sockets, name: str) -> None:
        self.sockets = sockets
        self.name = name

    def put(self, message: FromCore) -> None:
        self.sockets.told[self.name].append(message)

    def drop(self) -> None:
        self.sockets.dropped.append(self.name)


def request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams())


def news(*names: str, ends: bool = False, tokens: int = 3) -> CoreOutputs:
    stats = StepStats(**(dict.fromkeys(StepStats.__struct_fields__, 0) | {"hook_failures": (), "num_tokens": tokens}))
    finish = FinishReason.STOP if ends else None
    return CoreOutputs(
        outputs=[CoreOutput(request_id=name, new_token_ids=[1], finish_reason=finish) for name in names], stats=stats
    )


def two() -> Sockets:
    sockets = Sockets()
    for number in (1, 2):
        sockets.clients.attach(Attach(number, f"r{number}", f"o{number}"))
        sockets.clients.own(number, request(f"of-{number}"))
    sockets.clients.own(1, request("also-of-1"))
    assert set(sockets.take()) == {"o1", "o2"}, "who comes is told the state"
    return sockets


def names(message: CoreOutputs) -> list[str]:
    return [output.request_id for output in message.outputs]


def test_alone_whoever_started_the_core_is_told_all_as_it_is() -> None:
    sockets = Sockets()
    said = news("a", "b")
    sockets.clients.tell(said)
    assert sockets.take() == {"parent": [said]}
    sockets.clients.catch_up()
    assert sockets.take() == {} and sockets.clients.patience(1.0) == 1.0


def test_each_is_told_of_its_own_and_a_steps_tokens_count_once() -> None:
    sockets = two()
    sockets.now = 10.0
    sockets.clients.tell(news("of-1", "of-2", "also-of-1"))
    told = sockets.take()
    assert names(told["o1"][0]) == ["of-1", "also-of-1"] and names(told["o2"][0]) == ["of-2"]
    assert told["o1"][0].others == 1 and told["o2"][0].others == 2 and told["parent"][0].others == 3
    counted = [message.stats.num_tokens for (message,) in told.values()]  # type: ignore[union-attr]
    assert sorted(counted) == [0, 0, 3] and names(told["parent"][0]) == []

    sockets.clients.tell(news("of-2"))
    told = sockets.take()
    assert list(told) == ["o2"], "who has no news was told of the core's state a moment ago"
    assert told["o2"][0].stats.num_tokens == 3  # type: ignore[union-attr]
    sockets.clients.tell(news(tokens=512))  # a part of a prompt
    ((only,),) = sockets.take().values()
    assert only.stats.num_tokens == 512  # type: ignore[union-attr]
    sockets.now += STATE_SECONDS
    sockets.clients.tell(news("of-2", ends=True))
    told = sockets.take()
    assert set(told) == {"parent", "o1", "o2"} and [told[name][0].others for name in told] == [2, 0, 2]
    sockets.clients.tell(news("of-1", "also-of-1", ends=True))
    assert list(sockets.take()) == ["o1"], "those who wait for nothing are not woken while the next request may come"
    assert sockets.clients.patience(1.0) == STATE_SECONDS
    sockets.clients.catch_up()
    told = sockets.take()
    assert set(told) == {"parent", "o2"} and [message.others for (message,) in told.values()] == [0, 0]
    assert sockets.clients.patience(1.0) == 1.0


def test_who_has_gone_leaves_nothing() -> None:
    sockets = two()
    assert sockets.clients.owned(2, ["of-1", "of-2", "unknown"]) == ["of-2"], "nobody ends another's request"
    assert sockets.clients.detach(1) == ["of-1", "also-of-1"]
    assert sockets.heard == ["r2"] and sockets.dropped == ["o1"]
    assert not sockets.clients.known(1) and sockets.clients.known(2) and sockets.clients.known(0)
    sockets.clients.tell(news("of-1", "also-of-1", ends=True))  # the aborts that follow
    sockets.clients.catch_up()
    told = sockets.take()
    assert "o1" not in told and told["o2"][0].others == 0 and told["parent"][-1].others == 1
    assert sockets.clients.detach(1) == [] and sockets.clients.detach(7) == []


def test_all_may_go_at_once_and_others_come() -> None:
    sockets = two()
    assert sockets.clients.detach(1) + sockets.clients.detach(2) == ["of-1", "also-of-1", "of-2"]
    sockets.clients.tell(news(tokens=512))  # of a step under way
    sockets.clients.tell(news("of-1", "also-of-1", "of-2", ends=True))  # the aborts that follow
    sockets.take()
    sockets.clients.attach(Attach(3, "r3", "o3"))
    ((message,),) = sockets.take().values()
    assert message.others == 0, "requests of those who have gone are still counted"


def test_who_went_before_the_core_came_to_it_is_passed_over() -> None:
    sockets = two()
    sockets.clients.attach(Attach(3, "gone", "o3"))
    assert sockets.heard == ["r1", "r2"] and "o3" not in sockets.told
    assert not sockets.clients.known(3) and sockets.clients.detach(3) == []
