"""Nodes that are sound: two machines that are this one, at addresses of its loopback device."""

from __future__ import annotations

from typing import Any

from engine.interfaces.nodes import Node, NodesCard
from engine.process.local import LocalProcess
from engine.types.errors import EngineDeadError


class PlainNodes(NodesCard):
    """Two machines, which are one."""

    by_name = True
    several = True
    body = "plain_nodes:Plain"


class Plain:
    """See `engine.interfaces.nodes.Nodes`."""

    here = "127.0.0.1"
    timeout = 10.0

    def __init__(self, context: Any) -> None:
        self.started: list[LocalProcess] = []

    def all(self) -> tuple[Node, ...]:
        return Node("a", "127.0.0.2", processors=2), Node("b", "127.0.0.3", processors=2)

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> LocalProcess:
        if node not in ("a", "b"):
            raise EngineDeadError(f"start {what} on '{node}'", "there are a and b")
        self.started.append(self.start(module, start, what))
        return self.started[-1]

    def start(self, module: str, start: bytes, what: str) -> LocalProcess:
        return LocalProcess(module, start, what)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.close()
