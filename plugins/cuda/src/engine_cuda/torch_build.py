"""What the installed torch was built for, read from its files: importing it takes seconds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from engine_cuda.gpu import TorchBuild

_ASSIGNED = re.compile(r"^(__version__|cuda|hip)\s*(?::[^=]*)?=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)
_LABEL = re.compile(r"\+(?:cu(\d+)(\d)|rocm([\d.]+))")
"""Of a version like "2.11.0+cu130" or "2.11.0+rocm7.2"."""


def torch_build(folders: Sequence[str] | None = None) -> TorchBuild | None:
    """Of the torch that would be imported; None where there is none.

    folders: torch's own, instead of looking for it.
    """
    if folders is None:
        spec = importlib.util.find_spec("torch")
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    for folder in folders:
        try:
            text = Path(folder, "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        values = {name: single or double for name, single, double in _ASSIGNED.findall(text)}
        if values.get("__version__"):
            rocm = ".".join(values.get("hip", "").split(".")[:2])
            return TorchBuild(values["__version__"], numbers(values.get("cuda", "")), rocm)
    try:  # a build without that file: the label of its version
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    label = _LABEL.search(version)
    if label is None:
        return TorchBuild(version)
    major, minor, rocm = label.groups()
    return TorchBuild(version, (int(major), int(minor)) if major else None, rocm or "")


def numbers(version: str) -> tuple[int, int] | None:
    """ "13.0" -> (13, 0); None for anything that is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
