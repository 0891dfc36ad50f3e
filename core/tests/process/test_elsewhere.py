"""A child on another machine, which is this one at another address: what the connection carries, what its end means."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from engine.process import wire
from engine.process.child import Child, Elsewhere
from engine.process.local import LocalProcess
from engine.process.wire import Inbox, Outbox
from engine.types.errors import EngineDeadError

PLAYED = """
import time
import msgspec
from engine.process.run import run
from engine.types.messages import Shutdown

class Start(msgspec.Struct, frozen=True):
    text: str = ""

class Said(msgspec.Struct, frozen=True, tag="said"):
    text: str

def main(start, parent):
    parent.send(Said(start.text))
    while isinstance(message := parent.receive(), Said):
        parent.send(message)
    return 0

if __name__ == "__main__":
    run("the player", Start, Said | Shutdown, main)
"""


class Start(msgspec.Struct, frozen=True):
    text: str = ""


class Said(msgspec.Struct, frozen=True, tag="said"):
    text: str


Make = Callable[..., Child[Said]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "played_child.py").write_text(PLAYED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[Child[Said]] = []

    def make(timeout: float = 10.0) -> Child[Said]:
        elsewhere = Elsewhere(LocalProcess, "127.0.0.2", "127.0.0.3", timeout)
        made.append(Child("played_child", Start("hello"), Said, what="the player", elsewhere=elsewhere))
        return made[-1]

    yield make
    for child in made:
        child.end(0)
        child.close()
        assert not Path(child.directory).exists()


def hear(child: Child[Said]) -> str:
    while (message := child.receive(20.0)) is None:
        pass
    return message.text


def death(child: Child[Said]) -> str:
    with pytest.raises(EngineDeadError) as caught:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            child.receive(1.0)
    return str(caught.value)


def test_both_hear_each_other(play: Make) -> None:
    """Also what is said before it is known where the other listens. Each listens at its own address alone."""
    child = play()
    child.send(Said("before it listened"))
    assert child.remote and [hear(child), hear(child)] == ["hello", "before it listened"]
    child.send(Said("x" * 1_000_000))
    assert len(hear(child)) == 1_000_000
    listening = [one.laddr.ip for one in psutil.Process(child.pid).net_connections("tcp") if one.status == "LISTEN"]
    assert listening == ["127.0.0.3"] and child.inbox.address.startswith("tcp://127.0.0.2:")
    assert not child.cut and child.end(20) == 0


def test_one_that_dies_is_told_at_once(play: Make) -> None:
    child = play()
    hear(child)
    began = time.monotonic()
    os.kill(child.pid, signal.SIGKILL)
    assert "ended by signal 9" in death(child) and time.monotonic() - began < 2


def test_one_that_hangs_is_lost_when_its_time_is_over(play: Make) -> None:
    """As one whose machine hangs, or is cut off: nothing of the network tells of these."""
    child = play(timeout=1.0)
    hear(child)
    os.kill(child.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert "the connection to the player was lost while running" in death(child)
    assert time.monotonic() - began < 1.0 + 3.0  # and its last words are waited for
    child.end(0)
    assert not child.alive


def test_one_that_cannot_be_reached_is_lost(play: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches its parent, and a firewall lets nothing through the other way."""
    connect = Child._connect
    monkeypatch.setattr(wire, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(Child, "_connect", lambda self, address: connect(self, "tcp://127.0.0.3:1"))
    child = play(timeout=0.5)
    assert hear(child) == "hello"
    assert "no connection to tcp://127.0.0.3:1 could be made" in death(child)
    assert not child.alive


def test_a_stranger_cannot_fill_the_memory() -> None:
    """A frame that is longer than any message ends its connection, before keys were looked at."""
    _, secret = zmq.curve_keypair()
    inbox: Inbox[Said] = Inbox(Said, "tcp://127.0.0.2:*", secret)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    try:
        with socket.create_connection(("127.0.0.2", int(inbox.address.rpartition(":")[2])), 5.0) as raw:
            raw.sendall(greeting + b"\x06" + (wire.LONGEST_MESSAGE + 1).to_bytes(8, "big") + b"x" * 1000)
            while raw.recv(4096):
                pass
    finally:
        inbox.close()


def test_one_whose_parent_closes_leaves(play: Make) -> None:
    """The connection is the pipe: the process that holds the other pipe may be a third one, which lives on."""
    child = play()
    hear(child)
    child.inbox.close()
    assert psutil.wait_procs([psutil.Process(child.pid)], 20)[0] or not child.alive


def test_who_does_not_know_the_key_is_not_heard(tmp_path: Path) -> None:
    """Neither in the clear nor with a key of its own, and nonsense harms nobody."""
    public, secret = zmq.curve_keypair()
    inbox: Inbox[Said] = Inbox(Said, "tcp://127.0.0.2:*", secret)
    strangers = [Outbox(inbox.address, zmq.curve_keypair()[0], 1.0), Outbox(inbox.address)]
    for stranger in strangers:
        stranger.put(Said("let me in"))
    with socket.create_connection(("127.0.0.2", int(inbox.address.rpartition(":")[2]))) as raw:
        raw.sendall(os.urandom(500))
    known = Outbox(inbox.address, public, 1.0)
    known.put(Said("here I am"))
    assert inbox.get(20.0) == Said("here I am") and inbox.get(0.3) is None
    assert not known.lost()
    inbox.close()
    deadline = time.monotonic() + 20
    while not known.lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    for outbox in (known, *strangers):
        outbox.drop()
    assert time.monotonic() < deadline
