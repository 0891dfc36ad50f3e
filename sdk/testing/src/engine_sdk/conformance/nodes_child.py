"""What the suite of point `nodes` starts: a process that does as it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec

from engine.process.run import run
from engine.process.wire import Parent
from engine.types.messages import Shutdown


class Start(msgspec.Struct, frozen=True):
    """The start message."""

    text: str


class Told(msgspec.Struct, frozen=True, tag="told"):
    """What it says: its process id first, then what it was told; and what it is told."""

    pid: int
    text: str


def main(start: Start, parent: Parent[Any]) -> int:
    """Answer until told to stop; "exit N" ends it with that code, "child" starts one that leaves when it has gone."""
    parent.send(Told(os.getpid(), start.text))
    while not isinstance(order := parent.receive(), Shutdown):
        if order is None:
            continue
        if order.text.startswith("exit"):
            os._exit(int(order.text.split()[1]))
        if order.text == "child":
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            parent.send(Told(child.pid, "child"))
        else:
            parent.send(Told(os.getpid(), order.text))
    return 0


if __name__ == "__main__":
    run("a player", Start, Told | Shutdown, main)
