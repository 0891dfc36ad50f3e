"""The driver through the suite of its point: agents in threads of this process."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from engine_kit.alike import versions_here
from engine_nodes.agent import Session
from engine_nodes.messages import Hello
from engine_nodes.token import head_keys, read_token
from engine_sdk.conformance import NodesConformance

TOKEN = secrets.token_urlsafe(32)
FOLDER = tempfile.TemporaryDirectory(prefix="engine-token-")
FILE = Path(FOLDER.name) / "token"
FILE.touch(mode=0o600)
FILE.write_text(TOKEN)


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


HEAD = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"


def agent(name: str, address: str, stopped: threading.Event) -> None:
    """As `engine join` does, until it is stopped."""
    public, _ = head_keys(read_token(str(FILE), "token_file"))
    while not stopped.is_set():
        session = Session(HEAD, public, Hello(name, address, 0, 2, ("a test",), versions_here()))
        try:
            session.run(stopped)
        finally:
            session.close()
        stopped.wait(0.05)


class TestAgent(NodesConformance):
    driver, options = "agent", {"listen": HEAD, "token_file": str(FILE), "count": 2, "join_timeout": 30.0}
    places = frozenset({"listen", "token_file"})

    @classmethod
    @contextlib.contextmanager
    def machines(cls) -> Iterator[None]:
        stopped = threading.Event()
        threads = [
            threading.Thread(target=agent, args=(name, address, stopped))
            for name, address in (("a", "127.0.0.2"), ("b", "127.0.0.3"))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join(20)
        assert not [thread for thread in threads if thread.is_alive()]
