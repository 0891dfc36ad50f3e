"""A playground of fake distributions: real metadata on sys.path, so that discovery runs as it does for strangers."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine.plugin.candidate import Candidate


class Playground:
    """Writes modules and distributions into a folder that is on sys.path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def module(self, name: str, source: str) -> str:
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        self.modules.append(name)
        importlib.invalidate_caches()
        return name

    def distribution(
        self, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]] | str, folder: Path | None = None
    ) -> None:
        info = (folder or self.folder) / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if not isinstance(entry_points, str):
            entry_points = "\n".join(
                f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in entries.items())
                for group, entries in entry_points.items()
            )
        (info / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()

    def imported(self) -> set[str]:
        return {name for name in self.modules if name in sys.modules}


@pytest.fixture
def playground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Playground(tmp_path)
    yield made
    for name in made.modules:
        sys.modules.pop(name, None)


def candidate(point: str, name: str, value: str, distribution: str = "dist", major: int = 0) -> Candidate:
    return Candidate(point, name, major, distribution, "1.0", value)


@pytest.fixture(name="candidate")
def _candidate():  # type: ignore[no-untyped-def]
    return candidate
