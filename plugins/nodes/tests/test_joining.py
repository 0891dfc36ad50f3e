"""Who may join: who has the token, and is as the head is. What differs is said by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import agents_of_a_test as agents
import msgspec
import pytest

from engine.embedding import Key, Merged
from engine.interfaces.nodes import NODE_LOST, NodesContext, NodesNeed
from engine.types.errors import ConfigError, ManifestError, NodeMissingError
from engine.types.start import Choice, WorkerStart
from engine_kit.alike import differences, versions_here, what_is_here
from engine_nodes import agent as agent_module
from engine_nodes import head as head_module
from engine_nodes.agent import Session
from engine_nodes.card import AgentOptions
from engine_nodes.messages import Hello
from engine_nodes.token import SHORTEST, head_keys, read_token
from engine_sdk.conformance.core_contexts import start_message


class World:
    """A head and agents, in threads."""

    def __init__(self, folder: Path) -> None:
        self.machines = agents.Machines(folder, timeout=1.0)
        self.stack = ExitStack()
        self.errors: list[Exception] = []
        self.said: list[str | None] = []
        self.start: WorkerStart = start_message()

    def join(
        self,
        name: str,
        token: str | None = None,
        address: str = "127.0.0.2",
        versions: dict[str, str] | None = None,
    ) -> threading.Event:
        """A thread that joins once. The event stops it."""
        given = self.machines.token if token is None else Path(self.machines.token).parent / f"token-{name}"
        if token is not None:
            given.touch(mode=0o600)
            given.write_text(token)
        hello = Hello(name, address, 0, 1, (), versions_here() if versions is None else versions)
        session = Session(self.machines.head, head_keys(read_token(str(given), ""))[0], hello)
        stopped = threading.Event()

        def run() -> None:
            try:
                self.said.append(session.run(stopped))
            except ManifestError as error:
                self.errors.append(error)
            finally:
                session.close()

        thread = threading.Thread(target=run)
        thread.start()
        self.stack.callback(thread.join, 20)
        self.stack.callback(stopped.set)
        return stopped

    def head(self, count: int = 1, wait: float = 20.0) -> head_module.Head:
        options = AgentOptions(
            listen=self.machines.head, token_file=str(self.machines.token), count=count, timeout=1.0, join_timeout=wait
        )
        made = head_module.Head(NodesContext(need=NodesNeed(), start=self.start, options=options))
        self.stack.callback(made.close)
        return made


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    with made.stack:
        yield made


def test_who_has_another_token_is_not_heard(world: World) -> None:
    world.join("stranger", token="x" * SHORTEST)
    with pytest.raises(ConfigError, match=r"nodes.count=1; after 1 s these have joined tcp://\S+: none"):
        world.head(wait=1.0)


def test_a_token_that_others_may_read_or_guess_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="No such file"):
        read_token(str(file), "token_file")
    file.write_text("y" * 40)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"others than its owner .*chmod 600"):
        read_token(str(file), "token_file")
    file.chmod(0o600)
    assert read_token(str(file), "token_file") == b"y" * 40
    file.write_text("short")
    with pytest.raises(ConfigError, match="5 characters can be guessed; 32"):
        read_token(str(file), "token_file")
    with pytest.raises(ConfigError, match="no token is named"):
        read_token(None, "token_file")


def test_a_machine_that_is_not_alike_is_refused_by_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends say what differs, before anything starts."""

    def other(start: WorkerStart) -> dict[str, str]:
        return what_is_here(start) | {"Engine": "9.9", "torch": "1.0"}

    monkeypatch.setattr(agent_module, "what_is_here", other)
    world.join("b")
    with pytest.raises(ManifestError, match=r"take in node b .*Engine: 0\.\S+ on the head, 9\.9 there; torch: .* 1\.0"):
        world.head()
    agents.until(lambda: bool(world.errors))
    assert "Engine: " in str(world.errors[0]) and "9.9 there" in str(world.errors[0])


def test_versions_are_compared_before_anything_else_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "what_is_here", lambda start: pytest.fail("it looked"))
    world.join("b", versions=versions_here() | {"Engine": "9.9"})
    with pytest.raises(ManifestError, match=r"take in node b .*Engine: 0\.\S+ on the head, 9\.9 there"):
        world.head()


def test_a_look_that_fails_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(start: WorkerStart) -> dict[str, str]:
        raise PermissionError("the weights")

    monkeypatch.setattr(agent_module, "what_is_here", broken)
    world.join("b")
    with pytest.raises(ManifestError, match=r"take in node b .*could not look at its files: PermissionError: the wei"):
        world.head()


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:9400", "tcp://0:9400", "tcp://10.0.0.1:0", "tcp://10.0.0.1:65536"])
def test_an_address_that_is_not_its_own_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="name an address of this machine"):
        AgentOptions.model_validate({"listen": listen})


@pytest.mark.parametrize(
    "asked", [("tcp://h:x", None), ("tcp://h:0", None), ("tcp://h:70000", None), ("tcp://h:1", "0.0.0.0")]
)
def test_what_an_agent_cannot_join(asked: tuple[str, str | None], world: World) -> None:
    head, address = asked
    merged = Merged()
    for name, value in (("token_file", str(world.machines.token)), ("node_address", address)):
        if value is not None:
            merged.set(Key("settings", name), value)
    with pytest.raises(ConfigError, match="node_address=0.0.0.0" if address else "that is no address"):
        agent_module.join(head, merged)


def test_what_has_to_be_alike(tmp_path: Path) -> None:
    """Versions of drivers, the model's config and weights: other bytes, other lengths, no file."""
    start = start_message()
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 10_000)
    files = msgspec.structs.replace(start.files, folder=str(tmp_path), weights=(str(weights),))
    choice = Choice(point="ops", driver="torch", distribution="engine-reference", version="0.1.0", value="")
    nobodys = msgspec.structs.replace(choice, driver="nobodys", distribution="engine-nobody")
    start = msgspec.structs.replace(start, files=files, choices=(choice, nobodys))
    found = what_is_here(start)
    assert found["ops 'torch'"].startswith("engine-reference 0.") and found["ops 'nobodys'"] == "not installed"
    assert differences(found, what_is_here(start)) == []
    for change in (b"a" * 9_999 + b"b", b"a" * 9_999, None):
        weights.write_bytes(change) if change is not None else weights.unlink()
        (differing,) = differences(found, what_is_here(start))
        assert differing.startswith(f"{weights}: ") and ("cannot be read" in differing) == (change is None)
    (tmp_path / "config.json").unlink()
    assert len(differences(found, what_is_here(start))) == 2


def test_a_machine_that_falls_silent_is_lost_and_may_come_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    started = SimpleNamespace(
        pid=7, directory="/there", poll=lambda: None, let_go=lambda: None, kill=lambda hangs=False: None,
        close=lambda: None, describe=lambda: "process 7",
    )  # fmt: skip
    monkeypatch.setattr(agent_module, "LocalProcess", lambda *what: started)
    stopped = world.join("b")
    nodes = world.head()
    (node,) = nodes.all()
    assert (node.name, node.address, node.devices) == ("b", "127.0.0.2", 0)
    process = nodes.spawn("b", "module", b"", "core 0")
    assert process.poll() is None and process.pid == 7
    stopped.set()
    agents.until(lambda: process.poll() == NODE_LOST)
    assert "no sign of life for 1 s" in process.describe()
    assert nodes.all() == ()
    with pytest.raises(NodeMissingError, match="not there"):
        nodes.spawn("b", "module", b"", "core 0")
    world.join("b")
    agents.until(lambda: len(nodes.all()) == 1)
    assert nodes.spawn("b", "module", b"", "core 0").poll() is None


def test_a_head_that_has_not_listened_loses_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor twice: what came meanwhile lies there unread."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    world.join("b")
    nodes = world.head()
    monkeypatch.setattr(head_module, "time", clock)
    for _ in range(2):
        passed[0] += 3600.0
        agents.until(lambda: clock.monotonic() - nodes._beaten < 1800.0)  # which ends a look
    assert [node.name for node in nodes.all()] == ["b"]


def test_two_machines_of_one_name(world: World) -> None:
    world.join("b")
    nodes = world.head()
    world.join("b", address="127.0.0.3")
    agents.until(lambda: bool(world.errors))
    assert "a machine at 127.0.0.2 has the name b" in str(world.errors[0]) and len(nodes.all()) == 1
    world.join("b")  # of the same address: it may be the one that was there, and has not been missed yet
    agents.until(lambda: bool(world.said))
    assert "does not take it in: a machine at 127.0.0.2 has the name b" in str(world.said[0])
    assert len(nodes.all()) == 1 and len(world.errors) == 1
