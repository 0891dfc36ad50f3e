"""Engines with a fault in them, by every drive; and what must be left of them: nothing."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.frontend import launch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
Faulty = Callable[..., None]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """faulty(fate, step): engines that are made from now on run `fault_worker`, which meets this fate at that step."""

    def make(fate: str, step: int | str = 3, rank: int | None = None) -> None:
        monkeypatch.setenv("PYTHONPATH", str(HERE))
        monkeypatch.setenv("FAULT_FATE", fate)
        monkeypatch.setenv("FAULT_STEP", str(step))
        if rank is not None:
            monkeypatch.setenv("FAULT_RANK", str(rank))
        monkeypatch.setattr(launch, "CORE_WORKER", "fault_worker:FaultyWorker")

    return make


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which this test's directories lie; at the end it is empty, and no child runs, within 5 seconds."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    shared = set(os.listdir("/dev/shm"))
    folder = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp"))  # its path is short, as those of sockets must be
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    deadline = time.monotonic() + 5
    while True:
        ours = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TMPDIR") == str(folder)]
        left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
        alive = [p for p in {*ours, *left} if p.pid != os.getpid() and p.status() != psutil.STATUS_ZOMBIE]
        alive = [p for p in alive if p.name() != "test-template"]  # `tests/template.py`
        # Others are no files of ours: `tempfile` tries once whether it can write there, and may be killed meanwhile.
        directories = list(folder.glob("engine*"))
        if not alive and not directories:
            break
        assert time.monotonic() < deadline, (alive, directories)
        time.sleep(0.05)
    shutil.rmtree(folder)
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "engine" in name]
