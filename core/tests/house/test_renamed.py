"""The core knows no driver's name: with every entry point renamed, an engine is chosen, built and serves as before."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from engine.config.settings import EngineConfig
from engine.llm import LLMEngine
from engine.plugin import Registry, hookimpl
from engine.plugin.points import POINTS
from engine.types.errors import DriverNotFoundError
from engine.types.params import SamplingParams

SETTINGS = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory": "16MiB", "dtype": "float32"}
SETTINGS["swap_space"] = "1MiB"
NAMED = {"platform": "host", "ops": "torch", "attention": "torch", "executor": "inline", "evictor": "lru"} | {
    "scheduling_policy": "fcfs",
    "kv_connector": "host",
    "drafter": "ngram",
    "tokenizer_mode": "hf",
}

heard: list[tuple[str, object]] = []


class FrontendHook:
    @hookimpl
    def request_received(self, request):
        heard.append(("request_received", request.request_id))


class CoreHook:
    @hookimpl
    def step_done(self, stats):
        heard.append(("step_done", stats.step_id))


class WorkerHook:
    @hookimpl
    def worker_started(self, info):
        heard.append(("worker_started", info.num_pages))


def install(folder: Path, distribution: str, entries: Iterable[tuple[str, str, str]]) -> None:
    """Write a distribution's metadata; its modules are wherever they were."""
    info = folder / f"{distribution.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {value}\n" for group, name, value in entries))


@pytest.fixture
def renamed(tmp_path, monkeypatch):
    """Our own distributions, earlier on the path, under driver names that nobody has heard of.

    A model's name is its architecture, and stays.
    """
    found = [c for c in Registry.discover().found if c.point in POINTS]
    for distribution in {c.distribution for c in found}:
        entries = [
            (c.group, c.name if c.point == "model" else f"x-{c.name}", c.value)
            for c in found
            if c.distribution == distribution
        ]
        install(tmp_path, distribution, entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {c.name for c in Registry.discover().candidates("evictor")}
    assert "x-lru" in names and all(name.startswith("x-") for name in names)


def tokens(**settings: str) -> list[int]:
    engine = LLMEngine.from_engine_args(EngineConfig(**SETTINGS, **settings))
    try:
        engine.add_request("one", "Once upon a time", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        while engine.has_unfinished_requests():
            last = engine.step()
        return list(last[0].outputs[0].token_ids)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    found = tokens()
    assert len(found) == 8
    return found


def test_one_request_with_every_entry_point_renamed(expected, renamed):
    assert tokens() == expected


def test_renamed_drivers_are_asked_for_by_their_new_names(expected, renamed):
    assert tokens(**{point: f"x-{name}" for point, name in NAMED.items()}) == expected


@pytest.mark.parametrize("point", NAMED)
def test_the_old_names_are_gone(renamed, point):
    with pytest.raises(DriverNotFoundError):
        tokens(**{point: NAMED[point]})


def test_hooks_of_every_process_fire(expected, tmp_path, monkeypatch):
    heard.clear()
    hooks = {"frontend": "FrontendHook", "core": "CoreHook", "worker": "WorkerHook"}
    install(tmp_path, "dist-probe", [(f"engine.hooks.{p}.v0", "probe", f"{__name__}:{c}") for p, c in hooks.items()])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tokens() == expected
    names = [name for name, _ in heard]
    assert names.count("worker_started") == 1 and names.count("request_received") == 1
    assert names.count("step_done") >= 8
    assert names.index("worker_started") < names.index("request_received") < names.index("step_done")
