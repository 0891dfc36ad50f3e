"""Nodes `local`: this machine alone."""

from __future__ import annotations

import math
import os
import threading
from typing import TYPE_CHECKING

from engine.interfaces.nodes import Node, NodesCard
from engine.types.errors import EngineDeadError

if TYPE_CHECKING:
    from engine.interfaces.nodes import NodesContext
    from engine.process.local import LocalProcess


class LocalNodes(NodesCard):
    """The machine on which the engine is started."""

    body = "engine_reference.nodes_local:Local"


class Local:
    """See `engine.interfaces.nodes.Nodes`. What it starts leaves when this process has gone: it sees the end of its
    standard input."""

    here = ""
    timeout = math.inf

    def __init__(self, context: NodesContext) -> None:
        self._node = Node("local", processors=os.cpu_count() or 1)
        self._started: list[LocalProcess] = []
        self._lock = threading.Lock()

    def all(self) -> tuple[Node, ...]:
        return (self._node,)

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> LocalProcess:
        if node != self._node.name:
            raise EngineDeadError(f"start {what} on '{node}'", "there is this machine alone", "name others: --nodes")
        from engine.process.local import LocalProcess

        process = LocalProcess(module, start, what)
        with self._lock:
            self._started = [*(one for one in self._started if one.poll() is None), process]
        return process

    def close(self) -> None:
        with self._lock:
            started, self._started = self._started, []
        for process in started:
            process.let_go()
        for process in started:
            if process.poll() is None:
                process.kill()
            process.close()
