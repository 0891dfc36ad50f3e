"""Every process follows the list of plugins, and compares the hook plugins that it finds with the launcher's."""

from __future__ import annotations

import asyncio

import pytest

from engine import LLM, AsyncLLM, EngineConfig
from engine.frontend.launch import launch
from engine.types.errors import ConfigError, DriverDeniedError, ManifestError
from engine_kit.process_client import start_process
from tests.docs.installing import install, put_on_path

from .conftest import SETTINGS

PYPROJECT = """
[project]
name = "engine-trace"
version = "1.0"

[project.entry-points."engine.hooks.frontend.v0"]
trace = "engine_trace:Trace"

[project.entry-points."engine.hooks.core.v0"]
trace = "engine_trace:Trace"

[project.entry-points."engine.hooks.worker.v0"]
trace = "engine_trace:Trace"
"""


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A plugin that leaves the number of each process that imports it; the folder in which it does."""
    folder, traces = tmp_path / "installed", tmp_path / "traces"
    traces.mkdir()
    source = f"import os, pathlib\npathlib.Path({str(traces)!r}, str(os.getpid())).touch()\n\nclass Trace: ...\n"
    install({"pyproject.toml": PYPROJECT, "src/engine_trace.py": source}, folder)
    put_on_path(monkeypatch, folder)
    return tmp_path


def imported(trace) -> int:
    return len(list((trace / "traces").iterdir()))


def run(**settings) -> None:
    async def start() -> None:
        llm = AsyncLLM(EngineConfig(**{**SETTINGS, "tensor_parallel_size": 2, **settings}))
        try:
            await llm.start()
        finally:
            llm.shutdown()

    asyncio.run(start())


@pytest.mark.slow
def test_it_is_imported_in_every_process_and_with_a_list_in_none(trace):
    run()
    assert imported(trace) == 4  # this one, the core's, and two workers
    for path in (trace / "traces").iterdir():
        path.unlink()
    run(plugins="-engine-trace")
    run(plugins=["engine", "engine-tiny"])
    assert imported(trace) == 0
    with pytest.raises(DriverDeniedError, match=r"'-hooks:trace' denies it: --plugins -hooks:trace"):
        LLM(**SETTINGS, plugins="-hooks:trace", **{"hooks.trace.option": 1})
    with pytest.raises(ConfigError, match="did you mean 'engine-trace'"):
        LLM(**SETTINGS, plugins="-engine-trac")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda text: text.replace("1.0", "9.9"), "is of engine-trace 1.0 in the launcher, of engine-trace 9.9 here"),
        (lambda text: text.replace("engine-trace", "engine-track"), "of engine-track 1.0 here"),
    ],
)
@pytest.mark.parametrize("process", ["core", "worker"])
def test_another_version_of_a_hook_plugin_stops_the_start(trace, change, found, process):
    # With two workers these are processes of their own, whose error comes to the launcher through the core.
    plan = launch(EngineConfig(**SETTINGS, tensor_parallel_size=2 if process == "worker" else 1))
    info = trace / "installed" / "engine_trace-1.0.dist-info"
    points = info / "entry_points.txt"
    other = "worker" if process == "core" else "core"
    points.write_text(points.read_text().replace(f"hooks.{other}", "hooks.frontend"))
    plugins = [c for c in plan.start.worker.hook_plugins or () if c.point == f"hooks.{process}"]
    start = replace_worker(plan.start, hook_plugins=tuple(plugins))
    (info / "METADATA").write_text(change((info / "METADATA").read_text()))
    core = start_process(start)
    with pytest.raises(ManifestError) as caught:
        core.wait_ready()
    assert f"hooks.{process} 'trace'" in caught.value.found and found in caught.value.found
    assert caught.value.asked == "start with the hook plugins that the launcher found"
    assert imported(trace) == 0


def replace_worker(start, **changes):
    import msgspec

    return msgspec.structs.replace(start, worker=msgspec.structs.replace(start.worker, **changes))


def test_a_hook_plugin_that_the_launcher_does_not_have_stops_the_start(trace):
    start = replace_worker(launch(EngineConfig(**SETTINGS)).start, hook_plugins=())
    core = start_process(start)
    with pytest.raises(ManifestError, match=r"hooks.core 'trace' of engine-trace 1.0 is not installed where"):
        core.wait_ready()
