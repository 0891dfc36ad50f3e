"""Agents as processes of this machine, at addresses of its loopback device, or in a network of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

SECONDS = 60.0


def until(done: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Machines:
    """Machines by name, each an agent as `engine join` starts it."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", timeout: float = 2.0) -> None:
        self.token = folder / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_urlsafe(32))
        with socket.create_server((host, 0)) as listener:
            self.head = f"tcp://{host}:{listener.getsockname()[1]}"
        self.timeout = timeout
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.log = folder / "agents.log"

    def settings(self, count: int) -> dict[str, Any]:
        """An engine's."""
        return {
            "nodes": "agent",
            "nodes.listen": self.head,
            "nodes.token_file": str(self.token),
            "nodes.count": count,
            "nodes.timeout": self.timeout,
            "nodes.join_timeout": 60.0,
        }

    def start(self, name: str, address: str, prefix: Sequence[str] = ()) -> None:
        """Start a machine's agent. prefix: a command that runs it."""
        place = ["--node-name", name, "--node-address", address, "--token-file", str(self.token)]
        with self.log.open("ab") as log:
            self.agents[name] = subprocess.Popen(
                [*prefix, sys.executable, "-m", "engine", "join", self.head, *place], stdout=log, stderr=log
            )

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs on a machine: the agent, and what it started."""
        agent = psutil.Process(self.agents[name].pid)
        return [agent, *agent.children(recursive=True)]

    def hurt(self, name: str, how: str) -> list[psutil.Process]:
        """Kill the agent, or stop it, alone or with all that it started. What was running there."""
        found = self.processes(name)
        for process in found if how == "machine hangs" else found[:1]:
            process.send_signal(signal.SIGKILL if how == "agent killed" else signal.SIGSTOP)
        return found

    def end(self) -> None:
        """All of it."""
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, signal.SIGCONT)
                agent.terminate()
        for agent in self.agents.values():
            agent.wait(20)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none runs."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True
