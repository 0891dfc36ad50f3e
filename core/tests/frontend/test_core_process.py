"""The frontend's end of the core's process, against processes that a test plays."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from engine import EngineArgs
from engine.frontend import core_process
from engine.frontend.core_process import CoreProcess
from engine.frontend.launch import launch
from engine.types.errors import EngineDeadError

SILENT = """
import sys
sys.stdin.buffer.read()
"""


def start(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CoreProcess:
    (folder / "played_core.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(core_process, "MODULE", "played_core")
    return CoreProcess(launch(EngineArgs(model="tiny")).start)


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


def test_a_shutdown_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(SILENT, tmp_path, monkeypatch)
    closing = threading.Thread(target=lambda: (time.sleep(0.2), core.shutdown()))
    closing.start()
    with pytest.raises(EngineDeadError):  # shut down, or seen to have ended just before
        core.wait_ready()
    closing.join(20)
    assert not closing.is_alive() and not core.alive()
