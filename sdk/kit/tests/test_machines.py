"""Where workers sit, and processes that one machine starts for another."""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine.interfaces.nodes import NODE_LOST, Node
from engine.process.wire import decoder, encode
from engine.types.errors import ConfigError, EngineDeadError, EngineError, NodeMissingError
from engine.types.parallel import Parallel
from engine_kit.machines import Relay, of_core, rank_map, seats
from engine_kit.spawning import LONGEST_MESSAGE, Asker, Doer, Line, Order, Spawn, Told, client_keys, server_keys

SIZES = st.integers(1, 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), SIZES, SIZES, SIZES)
def test_devices_are_filled_and_layers_stay_together(devices: list[int], tp: int, pp: int, cores: int) -> None:
    nodes = [Node(f"n{at}", f"10.0.0.{at}", count) for at, count in enumerate(devices)]
    parallel, total = Parallel(tp=tp, pp=pp), tp * pp * cores
    if total > sum(devices):
        with pytest.raises(ConfigError, match=f"run {total} workers"):
            seats(nodes, parallel, cores)
        return
    found = seats(nodes, parallel, cores)
    assert [len(core) for core in found] == [tp * pp] * cores
    flat = [seat for core in found for seat in core]
    taken = Counter(seat.node for seat in flat)
    assert all(taken[node.name] <= node.devices for node in nodes)
    assert len({(seat.node, seat.device) for seat in flat}) == total
    assert all(seat.device < nodes[int(seat.node[1:])].devices for seat in flat)
    assert all(seat.sharers == taken[seat.node] for seat in flat)
    if sum(count // tp for count in devices) >= pp * cores:
        assert all(len({seat.node for seat in flat[at : at + tp]}) == 1 for at in range(0, total, tp))


@given(st.integers(1, 6), SIZES, SIZES, SIZES)
def test_workers_on_processors_are_dealt_evenly(count: int, tp: int, pp: int, cores: int) -> None:
    found = seats([Node(f"n{at}", f"10.0.0.{at}") for at in range(count)], Parallel(tp=tp, pp=pp), cores)
    flat = [seat.node for core in found for seat in core]
    assert flat == sorted(flat), "neighbours sit together"
    taken = Counter(flat)
    assert max(taken.values()) == math.ceil(len(flat) / count)


def test_a_node_that_hides_devices_numbers_them_anew() -> None:
    found = seats([Node("a", "10.0.0.1", 4, hides=True)], Parallel(tp=4), 1)
    assert [seat.device for seat in found[0]] == [0, 0, 0, 0]


def test_the_map_names_rank_machine_and_layers() -> None:
    parallel = Parallel(tp=1, pp=2)
    lines = rank_map(seats([Node("a", "10.0.0.1", 1), Node("b", "10.0.0.2", 1)], parallel, 1), parallel, 6)
    assert lines == [
        "core0:rank0 stage0 tp0: a (10.0.0.1), device 0, layers 0 to 2",
        "core0:rank1 stage1 tp0: b (10.0.0.2), device 0, layers 3 to 5",
    ]


class Played:
    """A process that a test ends."""

    pid = 7
    directory = "/there"

    def __init__(self) -> None:
        self.code: int | None = None
        self.did: list[str] = []

    def poll(self) -> int | None:
        return self.code

    def let_go(self) -> None:
        self.did.append("let go")

    def kill(self, hangs: bool = False) -> None:
        self.did.append("kill hung" if hangs else "kill")
        self.code = -9

    def describe(self) -> str:
        return "process 7, ended" if self.code is not None else "process 7, running"

    def close(self) -> None:
        self.did.append("close")


class Across:
    """A doer that is asked over TCP."""

    def __init__(self) -> None:
        self.played: list[Played] = []
        self.orders: list[Spawn] = []
        public, secret = zmq.curve_keypair()
        self.doers: dict[bytes, Doer] = {}
        self.fails: list[int] = []
        self.server = Line(zmq.ROUTER, "tcp://127.0.0.2:*", server_keys(secret), self._heard, self._look)
        self.server.start()
        self.client = Line(zmq.DEALER, self.server.address, client_keys(public), self._told)
        self.asker = Asker(lambda order: self.client.send(encode(order)), "node b", 10.0)
        self.client.start()

    def _heard(self, frames: list[bytes]) -> None:
        who = frames[0]
        self.doers.setdefault(who, Doer(self._spawn, lambda told: self.server.send(who, encode(told))))
        self.doers[who].take(decoder(Order).decode(frames[1]))

    def _look(self) -> None:
        for doer in list(self.doers.values()):
            doer.look()
        if self.fails:
            self.fails.pop()
            raise ZeroDivisionError("a driver's")

    def _told(self, frames: list[bytes]) -> None:
        self.asker.take(decoder(Told).decode(frames[0]))

    def _spawn(self, order: Spawn) -> Played:
        self.orders.append(order)
        if order.module == "bug":
            raise ZeroDivisionError("a driver's")
        if order.module == "none":
            raise EngineDeadError(f"start {order.what}", "no such module", "mend it")
        self.played.append(Played())
        return self.played[-1]

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def across() -> Iterator[Across]:
    made = Across()
    yield made
    made.close()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_on_another_machine_is_as_one_here(across: Across) -> None:
    process = across.asker.spawn("b", "module", b"\0secret", "core 0", 1)
    assert across.orders == [Spawn(1, "b", "module", b"\0secret", "core 0", 1)]
    assert (process.pid, process.directory, process.poll()) == (7, "/there", None)
    assert process.describe() == "process 7 on node b"
    process.let_go()
    until(lambda: across.played[0].did == ["let go"])
    process.kill(hangs=True)
    until(lambda: process.poll() is not None)
    assert process.poll() == -9 and process.describe() == "process 7, ended, on node b"
    assert across.played[0].did == ["let go", "kill hung", "close"]
    process.kill()
    process.let_go()


def test_what_cannot_be_started_says_why(across: Across) -> None:
    with pytest.raises(EngineError, match=r"start rank 3; no such module; mend it"):
        across.asker.spawn("b", "none", b"", "rank 3")
    with pytest.raises(EngineDeadError, match=r"start rank 4; ZeroDivisionError: a driver's"):
        across.asker.spawn("b", "bug", b"", "rank 4")


def test_a_look_that_fails_ends_nothing(across: Across) -> None:
    across.fails.append(1)
    until(lambda: not across.fails)
    assert across.asker.spawn("b", "module", b"", "core 0").pid == 7


def test_a_line_takes_no_frame_that_is_longer_than_any_message(across: Across) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.2", int(across.server.address.rpartition(":")[2])), 5.0) as raw:
        raw.sendall(greeting + b"\x06" + (LONGEST_MESSAGE + 1).to_bytes(8, "big") + b"x" * 1000)
        while raw.recv(4096):
            pass


def test_what_a_dead_core_started_ends() -> None:
    """Also where the core is not started again."""
    core, worker = Played(), Played()
    nodes: Any = SimpleNamespace(here="127.0.0.2", spawn=lambda *asked: worker, close=lambda: None)
    relay = Relay(nodes)
    nodes_of_core = of_core(relay.link(3, "127.0.0.3", 10.0))
    relay.watch(3, core)
    try:
        assert nodes_of_core.spawn("b", "module", b"", "rank 1").pid == 7
        core.code = -9
        until(lambda: worker.did == ["let go", "kill", "close"])
    finally:
        nodes_of_core.close()
        relay.close()


def test_what_a_lost_machine_ran_is_lost(across: Across) -> None:
    process = across.asker.spawn("b", "module", b"", "core 0")
    across.asker.lose("node b has gone: no sign of life for 10 s")
    assert process.poll() == NODE_LOST and "no sign of life" in process.describe()
    with pytest.raises(NodeMissingError, match="no sign of life"):  # for which no restart is counted
        across.asker.spawn("b", "module", b"", "core 1")


def test_nothing_that_a_lost_asker_started_stays(across: Across) -> None:
    across.asker.spawn("b", "module", b"", "core 0")
    (doer,) = across.doers.values()
    doer.end()
    assert across.played[0].did == ["let go", "kill", "close"]
