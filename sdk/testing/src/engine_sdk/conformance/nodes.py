"""The suite of point `nodes`."""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from engine.interfaces.nodes import Nodes, NodesContext, NodesNeed
from engine.process.child import Child, Elsewhere
from engine.process.run import PARENT_DIED
from engine.types.errors import EngineDeadError
from engine.types.parallel import Parallel
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.core_contexts import start_message
from engine_sdk.conformance.nodes_child import Start, Told

MODULE = "engine_sdk.conformance.nodes_child"
SECRET = "what-nobody-else-may-read"
SECONDS = 30.0
"""The longest that anything here may take; all of it takes a moment."""


class NodesConformance(Conformance):
    """What is started on a machine runs, hears and is heard; it ends when it is ended, when it is let go, and when the
    driver is; nothing of it is left, and nobody else can read what it was told.

    The machines of a test are this one, at whatever addresses: so processes and folders can be looked at. A driver that
    needs something to run on them overrides `machines`.
    """

    point = "nodes"
    protocol = "Nodes"

    @classmethod
    def needs(cls) -> Sequence[NodesNeed]:
        return [NodesNeed(num_cores=n, parallel=Parallel(tp=tp)) for n in (1, 4) for tp in (1, 8)]

    @classmethod
    def machines(cls) -> contextlib.AbstractContextManager[None]:
        """What has to run while the driver is at work."""
        return contextlib.nullcontext()

    @contextmanager
    def made(self) -> Iterator[Nodes]:
        """The driver at work; skipped where its card does not serve here."""
        need = NodesNeed()
        self.require(need)
        with self.machines():
            context = NodesContext(need=need, start=start_message(), options=self.subject().options)
            nodes: Nodes = self.body()(context)
            try:
                yield nodes
            finally:
                nodes.close()

    @contextmanager
    def child(self, nodes: Nodes, node: int = 0) -> Iterator[Child[Told]]:
        """A process on one of the machines, as the engine starts it."""
        name, address = nodes.all()[node][:2]
        elsewhere = Elsewhere(partial(nodes.spawn, name), nodes.here, address, nodes.timeout)
        child: Child[Told] = Child(MODULE, Start(SECRET), Told, what="a player", elsewhere=elsewhere)
        try:
            yield child
        finally:
            child.end(0)
            child.close()

    def test_machines_are_told_apart(self) -> None:
        """By names that stay, in an order that stays; they are the head itself, or all are reached by addresses."""
        card = self.subject().card
        with self.made() as nodes:
            found = nodes.all()
            assert found and found == nodes.all() and len({node.name for node in found}) == len(found)
            assert all(node.name and node.devices >= 0 and node.processors > 0 for node in found)
            assert {bool(node.address) for node in found} == {bool(nodes.here)} == {getattr(card, "several", False)}
            assert nodes.timeout > 0

    def test_what_is_started_hears_and_is_heard(self) -> None:
        """On every machine; long messages too. It stops when it is asked to."""
        with self.made() as nodes:
            for place in range(len(nodes.all())):
                with self.child(nodes, place) as child:
                    assert hear(child).text == SECRET
                    for text in ("one", "x" * 3_000_000, "two"):
                        child.send(Told(0, text))
                        assert hear(child).text == text
                    assert child.alive and child.code is None and not child.cut
                    assert child.end(SECONDS) == 0 and not child.alive

    def test_nobody_reads_what_it_was_told(self) -> None:
        """No secret stands on a command line, here or there, nor in a file; its folder is private, and goes with it."""
        with self.made() as nodes, self.child(nodes) as child:
            pid, folder = hear(child).pid, Path(child.directory)
            lines = [" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True)]
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(psutil.Process(pid).cmdline()))
            assert str(folder) in lines[-1] and not [line for line in lines if SECRET in line]
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            child.end(SECONDS)
            child.close()
            assert within(lambda: not folder.exists()), f"{folder} stays"

    @pytest.mark.parametrize("code", [0, 7])
    def test_exit_codes_are_told(self, code: int) -> None:
        with self.made() as nodes, self.child(nodes) as child:
            hear(child)
            child.send(Told(0, f"exit {code}"))
            assert within(lambda: child.code is not None) and child.code == code
            assert child.describe() and "\n" not in child.describe()

    def test_what_is_killed_is_gone(self) -> None:
        """With what it started, which sees that."""
        with self.made() as nodes, self.child(nodes) as child:
            pid = hear(child).pid
            child.send(Told(0, "child"))
            other = hear(child).pid
            child.kill()
            assert within(lambda: not alive(pid)) and within(lambda: child.code is not None) and child.code != 0
            assert within(lambda: not alive(other)), "what it started lives"

    def test_what_is_let_go_leaves(self) -> None:
        """Also before it was heard of; and twice is once."""
        with self.made() as nodes:
            name, address = nodes.all()[0][:2]
            process = None

            def spawn(module: str, start: bytes, what: str) -> object:
                nonlocal process
                process = nodes.spawn(name, module, start, what)
                return process

            child: Child[Told] = Child(
                MODULE, Start(""), Told, what="a player",
                elsewhere=Elsewhere(spawn, nodes.here, address, nodes.timeout),  # type: ignore[arg-type]
            )  # fmt: skip
            assert process is not None and process.poll() is None
            process.let_go()
            process.let_go()
            assert within(lambda: process.poll() is not None) and process.poll() == PARENT_DIED
            child.end(0)
            child.close()

    def test_several_at_once(self) -> None:
        """They do not get in each other's way, and one that ends takes no other with it."""
        with self.made() as nodes, contextlib.ExitStack() as stack:
            last = len(nodes.all()) - 1
            children = [stack.enter_context(self.child(nodes, place)) for place in (0, last, 0, last)]
            assert len({hear(child).pid for child in children}) == 4
            assert len({child.directory for child in children}) == 4
            children[1].kill()
            for place in (0, 2, 3):
                children[place].send(Told(0, str(place)))
                assert hear(children[place]).text == str(place)

    def test_the_end_of_a_connection_ends_it(self) -> None:
        """Of a process on another machine, whose parent has gone without a word."""
        with self.made() as nodes, self.child(nodes) as child:
            if not nodes.here:
                not_served("its processes end with their standard input")
            pid = hear(child).pid
            child.inbox.close()
            assert within(lambda: not alive(pid))

    def test_nothing_runs_on_when_it_is_closed(self) -> None:
        """However it was told to go, and closing twice is closing once."""
        with self.made() as nodes, self.child(nodes) as child:
            pid = hear(child).pid
            nodes.close()
            nodes.close()
            assert within(lambda: not alive(pid))

    def test_an_unknown_machine_is_refused(self) -> None:
        """And one that has gone."""
        with self.made() as nodes:
            for name in ("no-such-machine", ""):
                with pytest.raises(EngineDeadError, match=r"(?s).+"):
                    nodes.spawn(name, MODULE, b"", "a player")


def hear(child: Child[Told]) -> Told:
    """The next message. Raises its death where it has died."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if (message := child.receive(1.0)) is not None:
            return message
    raise AssertionError(f"nothing was heard for {SECONDS:g} s of {child.describe()}")


def within(done: Callable[[], bool]) -> bool:
    """Whether it is so before long."""
    deadline = time.monotonic() + SECONDS
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return done()


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be asked how it ended does not."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
