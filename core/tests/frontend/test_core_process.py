"""The frontend's end of the core's process, against processes that a test plays."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine import EngineArgs
from engine.frontend import core_process
from engine.frontend.core_process import CoreProcess
from engine.frontend.launch import launch
from engine.frontend.process_client import ProcessClient
from engine.types.errors import EngineDeadError

LATE = """
import sys, time
import zmq
from engine.types import wire
from engine.types.messages import ProcessStart, Ready, Reply, ToCore
from engine.types.start import WorkerReady

start = wire.decoder(ProcessStart).decode(wire.read_frame(sys.stdin.buffer))
context = zmq.Context()
outputs, requests = context.socket(zmq.PUSH), context.socket(zmq.PULL)
outputs.connect(start.outputs)
worker = WorkerReady(num_pages=2, weight_bytes=0, cache_bytes=0, num_parameters=0, load_seconds=0.0)
outputs.send(wire.encode(Ready(worker)))
time.sleep(0.5)  # what a loaded machine does between two lines
requests.connect(start.requests)
call = wire.decoder(ToCore).decode(requests.recv())
outputs.send(wire.encode(Reply(call.call_id, "heard")))
sys.stdin.buffer.read()
"""

GARBAGE = """
import sys, time
import zmq
from engine.types import wire
from engine.types.messages import ProcessStart, Ready
from engine.types.start import WorkerReady

start = wire.decoder(ProcessStart).decode(wire.read_frame(sys.stdin.buffer))
context = zmq.Context()
outputs, requests = context.socket(zmq.PUSH), context.socket(zmq.PULL)
requests.connect(start.requests)
outputs.connect(start.outputs)
if {ready}:
    outputs.send(wire.encode(Ready(WorkerReady(num_pages=2, weight_bytes=0, cache_bytes=0, num_parameters=0,
                                               load_seconds=0.0))))
outputs.send({said!r})
time.sleep(60)
"""

SILENT = """
import sys
sys.stdin.buffer.read()
"""


def start(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CoreProcess:
    (folder / "played_core.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(core_process, "MODULE", "played_core")
    return CoreProcess(launch(EngineArgs(model="tiny")).start)


def test_the_first_message_reaches_a_core_that_listens_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(LATE, tmp_path, monkeypatch)
    try:
        client = ProcessClient(core)
        client.wait_ready()
        answer = client.call("stats")
        assert client.receive(1.0).outputs == []
        assert answer.result(0) == "heard"
    finally:
        core.shutdown()


@pytest.mark.parametrize("said", [b"", b"nonsense", b"\x81\xa4type\xa7unheard", b"\x81\xa4type\xa7outputs"])
@pytest.mark.parametrize("ready", [True, False])
def test_a_core_that_sends_garbage_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes, ready: bool
) -> None:
    core = start(GARBAGE.format(said=said, ready=ready), tmp_path, monkeypatch)
    try:
        if ready:
            client = ProcessClient(core)
            client.wait_ready()
            answer = client.call("stats")
            with pytest.raises(EngineDeadError, match="read what the engine core sent"):
                client.receive(20)
            assert isinstance(answer.exception(0), EngineDeadError)
        else:
            with pytest.raises(EngineDeadError, match="read what the engine core sent"):
                core.wait_ready()
        assert not core.alive()
    finally:
        core.shutdown()
    assert not Path(core._directory).exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), FileNotFoundError(2, "No such folder")])
def test_no_room_for_sockets(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    plan = launch(EngineArgs(model="tiny")).start
    monkeypatch.setattr("tempfile.mkdtemp", fail)
    with pytest.raises(EngineDeadError, match=r"(No space|No such).*TMPDIR"):
        CoreProcess(plan)


def test_no_process_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    plan = launch(EngineArgs(model="tiny")).start
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", fail)
    with pytest.raises(EngineDeadError, match="temporarily unavailable"):
        CoreProcess(plan)
    assert list(tmp_path.iterdir()) == []


def test_a_core_whose_parent_dies_before_it_speaks(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", core_process.MODULE, str(folder)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3 and done.stderr == "" and not folder.exists()


def test_a_shutdown_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(SILENT, tmp_path, monkeypatch)
    closing = threading.Thread(target=lambda: (time.sleep(0.2), core.shutdown()))
    closing.start()
    with pytest.raises(EngineDeadError):  # shut down, or seen to have ended just before
        core.wait_ready()
    closing.join(20)
    assert not closing.is_alive() and not core.alive()
