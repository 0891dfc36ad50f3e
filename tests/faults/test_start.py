"""Who dies while an engine starts takes the others along: within seconds, and nothing is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import LLM, EngineArgs
from engine.types.errors import EngineDeadError
from engine_kit.async_llm import AsyncLLM

from .conftest import Faulty

SETTINGS: dict[str, Any] = {"model": "tiny", "num_kv_pages": 50, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("size", "fate"),
    [
        *((2, fate) for fate in ("killed", "raises")),
        *(pytest.param(2, fate, marks=pytest.mark.slow) for fate in ("exits", "has no memory")),
        (1, "killed"),
        *(pytest.param(1, fate, marks=pytest.mark.slow) for fate in ("exits", "has no memory", "raises")),
    ],
)
def test_a_worker(faulty: Faulty, nothing_left: Path, size: int, fate: str) -> None:
    faulty(fate, step="start")

    async def run() -> None:
        llm = AsyncLLM(EngineArgs(**SETTINGS, tensor_parallel_size=size))
        try:
            with pytest.raises(EngineDeadError, match={"killed": "signal 9", "exits": "code 7"}.get(fate, "Error")):
                await asyncio.wait_for(llm.start(), 30)
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_the_callers_own_worker(faulty: Faulty, nothing_left: Path) -> None:
    faulty("raises", step="start")
    with pytest.raises(RuntimeError, match="fell off the bus"):
        LLM(**SETTINGS)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("when", ["at once", "while it loads"])
def test_the_frontend(faulty: Faulty, nothing_left: Path, size: int, when: str) -> None:
    """`engine serve` is killed; its core, and that one's ranks, follow."""
    faulty("sleeps", step="start")
    command = [sys.executable, "-m", "faulty_server", "serve", "tiny", "--port", "0"]
    server = subprocess.Popen([*command, "--tensor-parallel-size", str(size)], stderr=subprocess.DEVNULL)
    family = psutil.Process(server.pid)
    wanted = 1 if when == "at once" else (2 if size == 2 else 1) + (size == 2)
    deadline = time.monotonic() + 60
    while len(family.children(recursive=True)) < wanted:
        assert time.monotonic() < deadline and server.poll() is None
        time.sleep(0.002)
    if when != "at once":
        time.sleep(1)
    server.kill()
    server.wait()
    # `nothing_left` looks for the others.
