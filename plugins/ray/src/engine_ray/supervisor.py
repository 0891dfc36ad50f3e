"""The actor that supervises one process of the engine, as an agent does: Ray carries processes, not tensors."""

from __future__ import annotations

import time

from engine.process.local import LocalProcess
from engine.process.wire import decoder
from engine.types.start import WorkerStart
from engine_kit.alike import what_is_here

LOOK_SECONDS = 0.02


class Supervisor:
    """Its process ends when it does: it holds the other end of its standard input."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    def found(self, start: bytes) -> dict[str, str]:
        """What this machine has of what is to be started, see `engine_kit.alike`."""
        message: WorkerStart = decoder(WorkerStart).decode(start)
        return what_is_here(message)

    def start(self, module: str, start: bytes, what: str) -> tuple[int, str]:
        """Start the process: its id, and its folder. Raises EngineDeadError."""
        self._process = LocalProcess(module, start, what)
        return self._process.pid, self._process.directory

    def wait(self) -> tuple[int, str]:
        """Its exit code, and how it ended, for people; when it has."""
        process = self._process
        assert process is not None
        while (code := process.poll()) is None:
            time.sleep(LOOK_SECONDS)
        how = process.describe()
        process.close()
        return code, how

    def let_go(self) -> None:
        """Close its standard input."""
        if self._process is not None:
            self._process.let_go()

    def kill(self, hangs: bool) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill(hangs)
