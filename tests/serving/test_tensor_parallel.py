"""`engine serve --tensor-parallel-size 2`: the same answers, and an orderly end whoever is killed."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest

from .conftest import Server

ARGS = (
    "tiny",
    "--dtype",
    "float64",
    "--tensor-parallel-size",
    "2",
    "--max-num-seqs",
    "8",
    "--kv-cache-memory",
    "32MiB",
)

pytestmark = pytest.mark.slow


def family(server: Server) -> tuple[psutil.Process, list[psutil.Process], list[Path]]:
    """The core, its ranks, and the directories of their sockets."""
    core = psutil.Process(server.core_pid())
    bound = [c.laddr for p in (core, psutil.Process(server.process.pid)) for c in p.net_connections("unix")]
    directories = {
        Path(str(address)).parent for address in bound if str(address).startswith(f"{tempfile.gettempdir()}/engine-")
    }
    assert len(core.children()) == 2 and len(directories) == 2
    return core, core.children(), sorted(directories)


def answer(server: Server, **fields: object) -> str:
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "seed": 7, **fields}
    reply = httpx.post(server.address + "/v1/completions", json=body, timeout=60).raise_for_status()
    return reply.json()["choices"][0]["text"]


def assert_gone(processes: list[psutil.Process], directories: list[Path], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive and not [directory for directory in directories if directory.exists()]


def test_answers_and_sigterm(server: Server) -> None:
    divided = Server(*ARGS)
    try:
        core, ranks, directories = family(divided)
        for temperature in (0, 0.9):
            assert answer(divided, temperature=temperature) == answer(server, temperature=temperature)
    finally:
        code = divided.stop()
    assert code == 0
    assert_gone([core, *ranks], directories, 5)


@pytest.mark.parametrize("who", ["rank", "core", "server"])
def test_a_killed_process_takes_the_others_with_it(who: str) -> None:
    """An idle engine notices, too; its server says so and ends."""
    divided = Server(*ARGS)
    try:
        core, ranks, directories = family(divided)
        answer(divided, temperature=0)
        victim = {"rank": ranks[1].pid, "core": core.pid, "server": divided.process.pid}[who]
        os.kill(victim, signal.SIGKILL)
        assert divided.process.wait(15) == (-9 if who == "server" else 1)
    finally:
        divided.stop()
    if who == "rank":
        log = "".join(divided.lines)
        assert "rank 1 of 2" in log and "ended by signal 9" in log
    assert_gone([core, *ranks], directories, 5)
