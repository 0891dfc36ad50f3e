"""What hears another process, and what tells it."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.process.wire import Inbox, Outbox, Parent
from engine.types.errors import EngineDeadError
from engine.types.messages import Abort, Shutdown


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Outbox, Inbox[Abort | Shutdown]]]:
    """Where messages are sent, and the inbox."""
    address = f"ipc://{tmp_path}/requests"
    outbox = Outbox(address)
    inbox: Inbox[Abort | Shutdown] = Inbox(Abort | Shutdown, address)
    yield outbox, inbox
    inbox.close()
    outbox.drop()


@pytest.mark.parametrize("awake", [0.0, 0.05])
def test_a_message_is_taken_asleep_and_awake(ends: tuple[Outbox, Inbox[Abort | Shutdown]], awake: float) -> None:
    outbox, inbox = ends
    for delay in (0.0, 0.01, 0.2):  # at once; while it is awake, where it is; asleep
        timer = threading.Timer(delay, outbox.put, [Abort(["a"])])
        timer.start()
        assert inbox.get(10.0, awake) == Abort(["a"])
        timer.join()


def test_nothing_comes(ends: tuple[Outbox, Inbox[Abort | Shutdown]]) -> None:
    _, inbox = ends
    for timeout, awake in ((0.0, 0.0), (0.0, 60.0), (0.05, 0.0), (0.05, 0.02)):
        assert inbox.get(timeout, awake) is None


def test_what_was_sent_before_anybody_listened_comes(tmp_path: Path) -> None:
    outbox = Outbox(f"ipc://{tmp_path}/late")
    outbox.put(Abort(["first"]))
    time.sleep(0.1)
    inbox: Inbox[Abort | Shutdown] = Inbox(Abort | Shutdown, f"ipc://{tmp_path}/late")
    outbox.put(Shutdown())
    assert (inbox.get(20.0), inbox.get(20.0)) == (Abort(["first"]), Shutdown())
    inbox.close()
    outbox.drop()


def test_a_place_that_is_gone_cannot_be_bound(tmp_path: Path, ends: tuple[Outbox, Inbox[Abort | Shutdown]]) -> None:
    outbox, inbox = ends
    with pytest.raises(FileNotFoundError, match="gone"):
        inbox.bind(f"ipc://{tmp_path}/gone/requests")
    outbox.put(Shutdown())
    assert inbox.get(20.0) == Shutdown(), "others are heard as before"


@pytest.mark.parametrize("kind", ["inbox", "outbox"])
def test_one_that_is_forgotten_is_no_trap(tmp_path: Path, kind: str) -> None:
    """As part of a cycle, with what an error's traceback holds, say: who collects it does not wait for its sockets."""
    forgotten: list[object] = (
        [Outbox(f"ipc://{tmp_path}/a")] if kind == "outbox" else [Inbox(Abort, f"ipc://{tmp_path}/a")]
    )
    forgotten.append(forgotten)
    del forgotten
    gc.collect()


def test_what_cannot_be_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parent: Parent[Abort | Shutdown] = Parent(Abort | Shutdown, str(tmp_path))
    sender = Outbox(f"ipc://{tmp_path}/requests")
    sender.put_encoded(b"\xc1")
    sender.put(Shutdown())
    assert parent.receive(20.0) is None
    assert parent.receive(20.0, 0.01) == Shutdown()
    assert "could not be read" in caplog.text
    parent.inbox.close()
    parent.outbox.drop()
    sender.drop()


def test_what_cannot_travel_is_an_error_of_whoever_tells(ends: tuple[Outbox, Inbox[Abort | Shutdown]]) -> None:
    with pytest.raises(EngineDeadError, match=r"tell another process.*does not travel"):
        ends[0].put(object())
