"""An API process that the system does not let start."""

from __future__ import annotations

import errno
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from engine.types.errors import EngineDeadError
from engine_server.processes.api_process import ApiProcess
from engine_server.processes.parent import Parent


async def test_no_descriptor_is_left_for_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever replaces a dead process tries again after this error, and after no other."""

    def refuse() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    process = ApiProcess(3, 1, {}, lambda _: None)
    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(EngineDeadError, match="start API process 3; .*Too many open files"):
        await process.start(lambda _: pytest.fail("it was made"), 0)


def test_it_is_told_of_no_core_that_comes_meanwhile() -> None:
    told: list[Any] = []
    parent = Parent.__new__(Parent)
    parent._worker, parent._cores = (SimpleNamespace(tell=told.append) for _ in range(2))  # type: ignore[assignment]
    core: Any = SimpleNamespace(dp_rank=0, pid=7)
    parent._attach(ApiProcess(3, 1, {}, lambda _: None), core)
    assert not told
