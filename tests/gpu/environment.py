"""An environment over the machine's own Python packages, without a network and without pip: the sources of the project
where they lie, what installers would have written of them, and wheels unpacked."""

from __future__ import annotations

import os
import shutil
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LACKING_ELSEWHERE = ("plugins/audio", "plugins/llguidance", "plugins/playground", "plugins/xgrammar")
"""Packages whose own libraries a GPU machine lacks."""


def packages() -> list[Path]:
    """The folders of what is served, in order of name. Nothing is compiled: `plugins/cpu`, whose cards others build on,
    is there without its native module, and says so."""
    found = [path.parent for path in ROOT.glob("*/*/pyproject.toml")] + [ROOT / "core"]
    out = {ROOT / name for name in LACKING_ELSEWHERE}
    return sorted(path for path in found if (path / "src").is_dir() and path not in out and "contrib" not in path.parts)


def prepare(target: Path, wheels: Path | None) -> None:
    """Fill a folder for `PYTHONPATH`: wheels unpacked, and for each package its metadata and entry points.

    Raises OSError, zipfile.BadZipFile and tomllib.TOMLDecodeError.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for wheel in sorted(wheels.glob("*.whl")) if wheels is not None else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    for package in packages():
        describe(package, target)


def describe(package: Path, target: Path) -> None:
    """Write what tells Python that a package is installed, from its pyproject.toml."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    needs = [f"Requires-Dist: {need}" for need in project.get("dependencies", ())]
    head = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *needs]
    (folder / "METADATA").write_text("\n".join([*head, ""]), encoding="utf-8")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *_points(points), "")]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def _points(points: dict[str, str]) -> Iterator[str]:
    return (f"{name} = {value}" for name, value in points.items())


def variables(target: Path | None) -> dict[str, str]:
    """The environment of the parts; None: of a Python that has the project installed."""
    found = dict(os.environ)
    if target is not None:
        sources = [str(package / "src") for package in packages()]
        paths = [str(target), *sources, str(ROOT), found.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    found |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Caches of compiled kernels that outlive the run would make a second one look better than the first.
    return found
