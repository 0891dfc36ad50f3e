"""The end of the core's process at which the frontend's messages arrive."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine.loop.process import Inbox
from engine.types import wire
from engine.types.messages import Abort, Shutdown


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], Inbox]]:
    """What the frontend sends with, and the inbox."""
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    address = f"ipc://{tmp_path}/requests"
    sender.bind(address)
    inbox = Inbox(address)
    yield sender, inbox
    inbox.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("awake", [0.0, 0.05])
def test_a_message_is_taken_asleep_and_awake(ends: tuple[zmq.Socket[bytes], Inbox], awake: float) -> None:
    sender, inbox = ends
    for delay in (0.0, 0.01, 0.2):  # at once; while it is awake, where it is; asleep
        timer = threading.Timer(delay, sender.send, [wire.encode(Abort(["a"]))])
        timer.start()
        assert inbox.get(10.0, awake) == Abort(["a"])
        timer.join()


def test_nothing_comes(ends: tuple[zmq.Socket[bytes], Inbox]) -> None:
    _, inbox = ends
    for timeout, awake in ((0.0, 0.0), (0.0, 60.0), (0.05, 0.0), (0.05, 0.02)):
        assert inbox.get(timeout, awake) is None


def test_what_cannot_be_read_is_left_out(
    ends: tuple[zmq.Socket[bytes], Inbox], caplog: pytest.LogCaptureFixture
) -> None:
    sender, inbox = ends
    sender.send(b"\xc1")
    sender.send(wire.encode(Shutdown()))
    ended = time.monotonic() + 10
    while (message := inbox.get(1.0, 0.01)) is None and time.monotonic() < ended:
        pass
    assert message == Shutdown()
    assert "could not be read" in caplog.text
