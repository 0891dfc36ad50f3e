"""What an editable installation of a package leaves behind, without its seconds."""

from __future__ import annotations

import tomllib
from pathlib import Path


def register(folder: Path, site: Path) -> None:
    """Write the package's metadata into `site`; its sources have to be on the path as well."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"]
    text = "\n".join(f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in groups[group].items()) for group in groups)
    (info / "entry_points.txt").write_text(text + "\n")
