"""Nodes with one planted fault each, in the place of a sound driver's body."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from mutant_suites import suites_of
from plain_nodes import Plain, PlainNodes

from engine.interfaces.nodes import Node
from engine.process.local import LocalProcess, private_directory
from engine_sdk.conformance import NodesConformance
from engine_sdk.conformance import nodes as suite

suite.SECONDS = 4.0


class OneName(Plain):
    """two machines have one name"""

    def all(self) -> tuple[Node, ...]:
        return tuple(node._replace(name="a") for node in super().all())


class ChangingOrder(Plain):
    """the machines stand in another order each time"""

    turn = 0

    def all(self) -> tuple[Node, ...]:
        self.turn += 1
        return super().all()[:: 1 if self.turn % 2 else -1]


class NoAddress(Plain):
    """a machine has no address"""

    def all(self) -> tuple[Node, ...]:
        return super().all()[0], Node("b")


class StartOnly(Plain):
    """the standard input is closed behind the start message"""

    def start(self, module: str, start: bytes, what: str) -> LocalProcess:
        process = super().start(module, start, what)
        process.let_go()
        return process


class OnTheCommandLine(Plain):
    """the start message stands on the command line, too"""

    def start(self, module: str, start: bytes, what: str) -> LocalProcess:
        return ByShell(module, start, what)


class ByShell(LocalProcess):
    def __init__(self, module: str, start: bytes, what: str) -> None:
        self.directory = private_directory(what)
        text = start.decode("latin-1").replace("\0", "")
        command = ["sh", "-c", 'exec 3<&0; "$0" -m "$1" "$2" <&3; exit $?', sys.executable, module, self.directory]
        self._process = subprocess.Popen([*command, text], stdin=subprocess.PIPE, start_new_session=True)
        self.pid = self._process.pid
        self._process.stdin.write(start)  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]


class OpenFolder(Plain):
    """everybody may look into a process's folder"""

    def start(self, module: str, start: bytes, what: str) -> LocalProcess:
        process = super().start(module, start, what)
        os.chmod(process.directory, 0o755)
        return process


class Changed(LocalProcess):
    def __init_subclass__(cls) -> None:
        cls.mutant = type(cls.__name__ + "Nodes", (Plain,), {"__doc__": cls.__doc__, "start": lambda self, *a: cls(*a)})

    mutant: Any


class LeavesItsFolder(Changed):
    """a process's folder stays"""

    def close(self) -> None:
        self.let_go()


class EndsWell(Changed):
    """every process ends with exit code 0"""

    def poll(self) -> int | None:
        return None if super().poll() is None else 0


class AsksToLeave(Changed):
    """a process that is killed is asked to leave, which it need not hear"""

    def kill(self, hangs: bool = False) -> None:
        self._process.send_signal(signal.SIGINT)


class KeepsIt(Changed):
    """a process that is let go is not"""

    def let_go(self) -> None:
        pass


class NeverEnds(Changed):
    """it is not seen that a process has ended"""

    def poll(self) -> int | None:
        return None


class SaysLittle(Changed):
    """a process is described by nothing"""

    def describe(self) -> str:
        return ""


class OneFolder(Plain):
    """two processes share a folder"""

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> LocalProcess:
        process = super().spawn(node, module, start, what, devices)
        process.directory = self.started[0].directory
        return process


class TakesOthersWithIt(Plain):
    """when a process is killed, all are"""

    def start(self, module: str, start: bytes, what: str) -> LocalProcess:
        process, started = super().start(module, start, what), self.started
        plain = process.kill

        def kill(hangs: bool = False) -> None:
            for other in started:
                LocalProcess.kill(other)
            plain()

        process.kill = kill  # type: ignore[method-assign]
        return process


class AnyMachine(Plain):
    """a machine that is not there is this one"""

    def spawn(self, node: str, module: str, start: bytes, what: str, devices: int = 0) -> LocalProcess:
        return super().spawn("a", module, start, what, devices)


class StaysWhenClosed(Plain):
    """what runs when the driver is closed runs on"""

    def close(self) -> None:
        pass


MUTANTS = [
    *(OneName, ChangingOrder, NoAddress, StartOnly, OnTheCommandLine, OpenFolder, OneFolder, TakesOthersWithIt),
    *(AnyMachine, StaysWhenClosed),
    *(one.mutant for one in (LeavesItsFolder, EndsWell, AsksToLeave, KeepsIt, NeverEnds, SaysLittle)),
]
globals().update(suites_of(NodesConformance, PlainNodes, MUTANTS))
