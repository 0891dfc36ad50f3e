"""Clients that leave, a core that dies, parents that die, servers side by side: nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from engine import EngineArgs, SamplingParams
from engine.frontend.launch import launch
from engine_kit.async_llm import AsyncLLM

from .conftest import Server

LONG = {"model": "tiny", "max_tokens": 400, "temperature": 0.8, "extra_body": {"ignore_eos": True}, "stream": True}


@pytest.mark.slow
def test_concurrent_streams_with_random_disconnects() -> None:
    """64 streams of which a third leaves midway; the others get a quiet engine's answers; no page stays in use."""
    draw = random.Random(0)
    work = [(f"Story {i}: once", draw.randint(8, 40), draw.random() < 0.35, draw.randint(1, 10)) for i in range(64)]

    def params(i: int, tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=0.9, seed=i, ignore_eos=True)

    async def run() -> None:
        llm = AsyncLLM(EngineArgs(model="tiny", dtype="float64", max_num_seqs=24, num_kv_pages=200))
        await llm.start()
        try:

            async def stream(i: int, leave: bool) -> str | None:
                prompt, tokens, _, after = work[i]
                await asyncio.sleep(draw.random() * 0.2)
                text, seen = "", 0
                async for output in (source := await llm.submit(prompt, params(i, tokens), f"r{i}-{leave}")):
                    text, seen = output.outputs[0].text, seen + 1
                    if leave and seen >= after:
                        source.close()
                        return None
                return text

            loud = await asyncio.gather(*(stream(i, work[i][2]) for i in range(len(work))))
            assert any(text is None for text in loud) and any(text is not None for text in loud)
            await asyncio.sleep(0.3)
            stats = await llm.call("stats")
            assert (stats["pages_used"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
            await llm.call("check_integrity")
            for i, text in enumerate(loud):
                if text is not None:
                    assert text == await stream(i, False), f"stream {i} differs from a quiet engine's"
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_http_disconnects_leave_nothing_running(server: Server) -> None:
    """The same over HTTP: after every client has gone the server is idle and answers as before."""
    client = server.client()
    before = client.completions.create(model="tiny", prompt="Quiet", max_tokens=16, temperature=0).choices[0].text

    def leave_early(i: int) -> None:
        with server.client() as own:
            stream = own.completions.create(prompt=f"Noise {i}", **LONG)
            for seen, _ in enumerate(stream):
                if seen == i % 7:
                    stream.close()
                    return

    threads = [threading.Thread(target=leave_early, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    with httpx.Client() as plain, pytest.raises(httpx.ReadTimeout):  # a client that gives up on a whole answer
        body = {"prompt": "Noise", "max_tokens": 1500, "ignore_eos": True}
        plain.post(server.address + "/v1/completions", json=body, timeout=0.3)
    for thread in threads:
        thread.join(60)
    after = client.completions.create(model="tiny", prompt="Quiet", max_tokens=16, temperature=0).choices[0].text
    assert after == before
    core = psutil.Process(server.core_pid())
    deadline = time.monotonic() + 10
    while core.cpu_percent(0.3) > 5:  # an idle core sleeps on its inbox; 32 x 400 tokens would keep it busy for long
        assert time.monotonic() < deadline, "the core still works for clients that have gone"


def test_killed_core_is_told_to_every_client() -> None:
    server = Server("tiny")
    try:
        outcomes: list[tuple[str, float]] = []
        started = threading.Barrier(9)

        def watch(stream: bool) -> None:
            client = server.client()
            try:
                if stream:
                    source = client.completions.create(prompt="Long", **(LONG | {"max_tokens": 1900}))
                    next(iter(source))
                    started.wait(30)
                    for _ in source:
                        pass
                else:
                    started.wait(30)
                    client.completions.create(prompt="Long", **(LONG | {"stream": False, "max_tokens": 1900}))
                outcomes.append(("finished", time.monotonic()))
            except openai.APIError as error:
                outcomes.append((type(error).__name__, time.monotonic()))

        threads = [threading.Thread(target=watch, args=(i % 2 == 0,)) for i in range(8)]
        for thread in threads:
            thread.start()
        started.wait(30)
        time.sleep(0.2)
        killed = time.monotonic()
        os.kill(server.core_pid(), signal.SIGKILL)
        health = None
        while time.monotonic() < killed + 2 and health != 503 and server.process.poll() is None:
            try:
                health = httpx.get(server.address + "/health", timeout=2).status_code
            except httpx.TransportError:
                break
        assert health == 503 or server.process.poll() not in (None, 0)
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive(), "a client hangs"
        assert len(outcomes) == 8
        assert all(name != "finished" for name, _ in outcomes), outcomes
        assert all(when - killed < 2 for _, when in outcomes), [when - killed for _, when in outcomes]
        assert server.process.wait(10) == 1
    finally:
        if server.process.poll() is None:
            server.process.kill()


def test_core_follows_a_killed_server() -> None:
    server = Server("tiny")
    core = psutil.Process(server.core_pid())
    directory = _socket_directory(core)
    server.process.kill()
    server.process.wait()
    core.wait(5)
    assert not os.path.exists(directory)


def test_sigterm_leaves_nothing_behind() -> None:
    server = Server("tiny")
    core = psutil.Process(server.core_pid())
    directory = _socket_directory(core)
    assert os.path.isdir(directory)
    assert server.stop() == 0
    assert not core.is_running()
    assert not os.path.exists(directory)


@pytest.mark.slow
def test_two_servers_side_by_side() -> None:
    first, second = Server("tiny"), Server("tiny", "--served-model-name", "other")
    try:
        assert first.address != second.address
        assert [m.id for m in first.client().models.list()] == ["tiny"]
        assert [m.id for m in second.client().models.list()] == ["other"]
        texts = [
            s.client().completions.create(model=name, prompt="Hi", max_tokens=8, temperature=0).choices[0].text
            for s, name in ((first, "tiny"), (second, "other"))
        ]
        assert texts[0] == texts[1]
    finally:
        assert [first.stop(), second.stop()] == [0, 0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["/no/such/folder", "--port", "0"], ["/no/such/folder"]),
        (["tiny", "--attention=flsh", "--port", "0"], ["flsh", "attention"]),
        (["tiny", "--max-model-len", "100000", "--port", "0"], ["100000", "2048"]),
        (["tiny", "--num-kv-pages", "1", "--port", "0"], ["page"]),
        (["tiny", "--port", "99999"], ["99999"]),
    ],
)
def test_a_start_that_cannot_work_says_why(args: list[str], words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "engine", "serve", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def _truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _change_config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _pickle_weights(folder: Path) -> None:
    """Weights that are a program, as torch.save writes them; whoever loads them runs it."""

    class Program:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return exec, (f"open({str(folder / 'it-ran')!r}, 'w')",)

    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "tokenizer.model"):
        (folder / name).write_bytes(pickle.dumps(Program()))


def _bring_code(folder: Path) -> None:
    (folder / "modeling.py").write_text(f"open({str(folder / 'it-ran')!r}, 'w')\nclass Model: pass\n")
    _change_config(architectures=["Model"], auto_map={"AutoModelForCausalLM": "modeling.Model"})(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, ["model.safetensors"]),
        (_pickle_weights, ["safetensors"]),
        (_bring_code, ["load Model"]),
        pytest.param(lambda folder: (folder / "model.safetensors").unlink(), ["safetensors"], marks=pytest.mark.slow),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
        pytest.param(lambda folder: (folder / "config.json").unlink(), ["config.json"], marks=pytest.mark.slow),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), ["tokenizer.json"]),
        (_change_config(architectures=["NoSuchForCausalLM"]), ["NoSuch", "engine-transformers", "no decoder"]),
        (_change_config(hidden_size=48), ["weight"]),
        pytest.param(_change_config(num_hidden_layers=99), ["layers"], marks=pytest.mark.slow),
        pytest.param(_change_config(vocab_size=10), ["weight"], marks=pytest.mark.slow),
        (_change_config(num_attention_heads=0), ["num_attention_heads"]),
    ],
)
def test_a_model_that_cannot_be_served_says_why(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(launch(EngineArgs(model="tiny")).files.folder, folder)
    damage(folder)
    done = subprocess.run(
        [sys.executable, "-m", "engine", "serve", str(folder), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in ("error: ", "found: ", "to do: ", *words):
        assert word in done.stderr, done.stderr
    assert not (folder / "it-ran").exists()


def test_a_taken_port_is_named(server: Server) -> None:
    port = server.address.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "engine", "serve", "tiny", "--port", port], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and port in done.stderr and "Traceback" not in done.stderr


def _socket_directory(core: psutil.Process) -> str:
    paths = [os.path.dirname(c.laddr) for c in core.parent().net_connections("unix") if "engine-" in str(c.laddr)]
    assert paths, "the server has no socket directory"
    return paths[0]
