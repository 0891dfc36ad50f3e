"""What has to be the same on every machine of an engine, and where it differs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.plugin import PluginList, Registry
from engine.types.errors import CheckpointError
from engine.types.start import WorkerStart
from engine_kit.engine_identity import read_parts

PACKAGES = {"Engine": "engine-base", "engine-kit": "engine-kit", "torch": "torch", "pyzmq": "pyzmq"}
CONFIG_FILES = ("config.json", "model.safetensors.index.json")
"""Read whole, where there are any; of weights evenly spaced parts are read, as for a store's keys."""


def versions_here() -> dict[str, str]:
    """This machine's, by name: without them nothing else that is said can be understood."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "processor": platform.machine()}
    return found | {name: _version(package) for name, package in PACKAGES.items()}


def what_is_here(start: WorkerStart) -> dict[str, str]:
    """This machine's, by name: versions, the drivers that were chosen, and the files of the same paths."""
    found = versions_here()
    registry = Registry.discover().following(PluginList(start.plugins, "by the head"))
    for choice in (*start.choices, *(start.hook_plugins or ())):
        offers = [one for one in registry.candidates(choice.point) if one.name == choice.driver]
        mine = next((one for one in offers if one.distribution == choice.distribution), next(iter(offers), None))
        where = "not installed" if mine is None else f"{mine.distribution} {mine.version}"
        found[f"{choice.point} '{choice.driver}'"] = where
    for files in (start.files, *(draft.files for draft in start.drafts)):
        for name in CONFIG_FILES:
            path = Path(files.folder) / name
            if path.is_file():
                found[str(path)] = sha256(path.read_bytes()).hexdigest()[:16]
            elif name == "config.json":
                found[str(path)] = "missing"
        for weights in files.weights:
            found[weights] = _identity(weights)
    return found


def differences(head: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """What differs, a phrase each."""
    names = [*head, *(name for name in there if name not in head)]
    return [
        f"{name}: {head.get(name, 'missing')} on the head, {there.get(name, 'missing')} there"
        for name in names
        if head.get(name) != there.get(name)
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _identity(path: str) -> str:
    found = sha256()
    try:
        read_parts(path, found)
    except CheckpointError as error:
        return f"cannot be read ({error.found})"
    return found.hexdigest()[:16]
