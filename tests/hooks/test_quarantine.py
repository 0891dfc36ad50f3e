"""Plugins broken in every way, in every process, that nobody asked for: the server serves, and tells of each."""

from __future__ import annotations

import httpx
import pytest

from tests.docs.installing import install, put_on_path
from tests.serving.conftest import Server

PROCESSES = ("frontend", "core", "worker")
HOOKS = {"frontend": "request_received", "core": "step_done", "worker": "worker_started"}
BROKEN = {
    "raises": "raise RuntimeError('the moon has set')",
    "syntax": "class Card(",
    "lacks": "import a_library_that_nobody_has",
    "leaves": "raise SystemExit(3)",
    "wrong": "Card = 3",
}
"""Ways of a card to be broken, by the driver's name, for the evictor and for hooks alike."""
FAILS = """
from engine.plugin import hookimpl

@hookimpl
def {hook}():
    raise LookupError("{hook} has a fault")
"""


def project() -> str:
    groups = {"evictor": list(BROKEN)} | {f"hooks.{process}": [*BROKEN, "misspelt", "fails"] for process in PROCESSES}
    text = '[project]\nname = "engine-moon"\nversion = "1.0"\n'
    for group, names in groups.items():
        text += f'\n[project.entry-points."engine.{group}.v0"]\n'
        for name in names:
            module = f"moon_{name}_{group.split('.')[-1]}" if name in ("misspelt", "fails") else f"moon_{name}"
            value = module if name in ("misspelt", "fails") else f"{module}:Card"
            text += f'{name} = "{value}"\n'
    return text


@pytest.fixture
def moon(tmp_path, monkeypatch):
    files = {"pyproject.toml": project(), **{f"src/moon_{name}.py": text for name, text in BROKEN.items()}}
    for process, hook in HOOKS.items():
        files[f"src/moon_fails_{process}.py"] = FAILS.format(hook=hook)
        files[f"src/moon_misspelt_{process}.py"] = FAILS.format(hook=hook[:-1])
    install(files, tmp_path / "installed")
    put_on_path(monkeypatch, tmp_path / "installed")


def test_a_server_of_several_processes_serves_and_tells(moon):
    flags = ["--tensor-parallel-size", "2", "--dtype", "float32", "--kv-cache-memory", "32MiB", "--verbose"]
    server = Server("tiny", *flags)
    try:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}
        for _ in range(3):
            assert httpx.post(f"{server.address}/v1/completions", json=body, timeout=60).status_code == 200
        metrics = server.metrics()
    finally:
        assert server.stop() == 0
    banner = "".join(server.lines).partition("broken, and left out")[2]
    expected = {("evictor", name) for name in BROKEN}
    # A hook plugin may be any object, so 3 is one that listens to nothing.
    hooks = [name for name in (*BROKEN, "misspelt") if name != "wrong"]
    expected |= {(f"hooks.{process}", name) for process in PROCESSES for name in hooks}
    for point, name in expected:
        assert f"{point} '{name}'" in banner, (point, name)
        labels = f"distribution=engine-moon,driver={name},point={point},version=1.0"
        assert metrics[f"quarantined_plugin_info{{{labels}}}"] == 1
    assert metrics["quarantined_drivers"] == len(expected)
    assert metrics["hook_failures_total{hook=request_received,plugin=fails}"] == 3
    assert metrics["hook_failures_total{hook=step_done,plugin=fails}"] >= 10  # disabled then
    assert metrics["hook_failures_total{hook=worker_started,plugin=fails}"] == 2  # one a worker
    assert "RuntimeError: the moon has set" in banner and "a_library_that_nobody_has" in banner
