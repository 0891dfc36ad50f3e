"""A hook plugin in a distribution of its own, heard by this process and by every child."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.installing import install, put_on_path

SOURCE = Path(__file__).with_name("recorder.py")
PYPROJECT = """
[project]
name = "engine-recorder"
version = "0.1.0"

[project.entry-points."engine.hooks.frontend.v0"]
re-corder = "engine_recorder:Frontend"

[project.entry-points."engine.hooks.core.v0"]
re-corder = "engine_recorder:Core"

[project.entry-points."engine.hooks.worker.v0"]
re-corder = "engine_recorder:Worker"
"""
SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float32", "max_model_len": 256, "kv_cache_memory": "32MiB"}


class Recorded:
    """What the plugin wrote down."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def of(self, hook: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["hook"] == hook]

    @property
    def names(self) -> list[str]:
        return [call["hook"] for call in self.calls]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    folder = tmp_path / "installed"
    install({"pyproject.toml": PYPROJECT, "src/engine_recorder.py": SOURCE.read_text()}, folder)
    put_on_path(monkeypatch, folder)
    return Recorded(tmp_path / "calls.jsonl")


@pytest.fixture
def options(recorded: Recorded) -> Callable[..., dict[str, Any]]:
    """Settings of an engine with the plugin, whose options these are."""

    def settings(**given: Any) -> dict[str, Any]:
        values = {"path": str(recorded.path), **given}
        return SETTINGS | {f"hooks.re-corder.{name}": value for name, value in values.items()}

    return settings
