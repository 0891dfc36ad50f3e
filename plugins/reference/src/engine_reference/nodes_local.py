"""Nodes `local`: this machine alone."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from engine.interfaces.nodes import Node, NodesCard
from engine.process.local import LocalProcess

if TYPE_CHECKING:
    from engine.interfaces.context import NodesContext


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

    def all(self) -> tuple[Node, ...]:
        return (self._node,)

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> LocalProcess:
        assert node == self._node.name
        return LocalProcess(module, start, what)

    def close(self) -> None:
        """Processes belong to those who started them."""
