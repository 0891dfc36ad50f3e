"""Whether the system has a process stopped, or one that it has started."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from engine.process.child import ProcessTree

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signals that stop")


@pytest.fixture
def parent() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as running:
        process = psutil.Process(running.pid)
        yield process
        for one in (*process.children(), process):
            one.kill()


def soon(found: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found()


def test_stopped_and_continued(parent: psutil.Process) -> None:
    assert soon(lambda: bool(parent.children()))
    looked_at = ProcessTree(parent.pid)
    assert not looked_at.stopped()
    for one in (parent, *parent.children()):
        one.suspend()
        assert soon(looked_at.stopped)
        one.resume()
        assert soon(lambda: not looked_at.stopped())


def test_one_that_works_or_has_ended_is_not_stopped() -> None:
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as busy:
        looked_at = ProcessTree(busy.pid)
        assert not any(looked_at.stopped() for _ in range(20))  # however long its step takes
        busy.kill()
    assert not looked_at.stopped() and not ProcessTree(busy.pid).stopped()
