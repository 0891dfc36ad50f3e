"""The frontend's end of the core's process, against processes that a test plays."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

import pytest

from engine.frontend import core_process
from engine.frontend.core_process import CoreProcess
from engine.frontend.launch import launch
from engine.types.errors import EngineDeadError
from engine.types.messages import Call, Reply

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

SILENT = """
import sys
sys.stdin.buffer.read()
"""


def start(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CoreProcess:
    (folder / "played_core.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(core_process, "MODULE", "played_core")
    from engine import EngineArgs

    return CoreProcess(launch(EngineArgs(model="tiny")).start)


def test_the_first_message_reaches_a_core_that_listens_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(LATE, tmp_path, monkeypatch)
    try:
        core.wait_ready()
        heard: queue.Queue[object] = queue.Queue()
        core.listen(heard.put, heard.put)
        core.send(Call(7, "stats"))
        assert heard.get(timeout=20) == Reply(7, "heard")
    finally:
        core.shutdown()


def test_a_shutdown_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(SILENT, tmp_path, monkeypatch)
    closing = threading.Thread(target=lambda: (time.sleep(0.2), core.shutdown()))
    closing.start()
    with pytest.raises(EngineDeadError):  # shut down, or seen to have ended just before
        core.wait_ready()
    closing.join(20)
    assert not closing.is_alive() and not core.alive()
