"""Other libraries that drivers compute with: which version is installed, read from metadata alone, and what they say
where they do not load or fail."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from engine.types.errors import ConfigError


def version_of(distribution: str) -> str:
    """ "" where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def numbers_of(version: str, count: int = 3) -> tuple[int, ...]:
    """The leading numbers of a version: "0.7.2.post1+cu130" -> (0, 7, 2)."""
    parts = version.partition("+")[0].split(".")[:count]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def install_line(distribution: str, least: tuple[int, ...], extra: str = "") -> str:
    """What to type. extra: of the distribution, with its brackets."""
    return f"pip install '{distribution}{extra}>={'.'.join(map(str, least))}'"


def why_not_installed(distribution: str, version: str, least: tuple[int, ...], extra: str = "") -> list[str]:
    """Why the version that is there ("" for none) does not do. least: the one whose functions were read."""
    if not version:
        return [f"{distribution} is not installed ({install_line(distribution, least, extra)})"]
    if numbers_of(version, len(least)) < least:
        return [f"{distribution} {version} is too old ({install_line(distribution, least, extra)})"]
    return []


def loaded(distribution: str, modules: Iterable[str], hint: str) -> list[Any]:
    """A library's modules. Raises ConfigError where they do not load, whatever their own start raises."""
    try:
        return [importlib.import_module(module) for module in modules]
    except Exception as error:
        raise ConfigError(f"load {distribution}", f"it says: {first_line(error)}", hint) from error


def first_line(error: Exception) -> str:
    """Of what it says; its class's name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
