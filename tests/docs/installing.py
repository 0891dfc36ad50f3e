"""A driver written in a text, installed: its files and its metadata in a folder for PYTHONPATH."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(files: Mapping[str, str], folder: Path) -> None:
    """Write the modules, and what an installer would make of pyproject.toml: a dist-info with the entry points."""
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for path, text in files.items():
        target = folder / path.removeprefix("src/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def put_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As if installed, for this process and those that it starts."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
