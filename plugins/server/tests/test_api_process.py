"""What starting an API process says where the system refuses."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from engine.types.errors import EngineDeadError
from engine_server.processes.api_process import ApiProcess


async def test_no_descriptor_is_left_for_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever replaces a dead process tries again after this error, and after no other."""

    def refuse() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    process = ApiProcess(3, 1, {}, lambda _: None)
    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(EngineDeadError, match="start API process 3; .*Too many open files"):
        await process.start(lambda _: pytest.fail("it was made"), 0)
