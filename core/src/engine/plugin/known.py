"""Drivers that are known to exist, installed or not: what to install for them.

The core knows none. The distribution `engine` lists ours as entry points of groups `engine_known.POINT`: the driver's
name, and the package that offers it. They are read when an error is printed, and never loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

_PREFIX = "engine_known."


@cache
def known_drivers() -> Mapping[str, Mapping[str, str]]:
    """By point: driver to distribution, e.g. {"attention": {"flash": "engine-flashattn"}}."""
    points: dict[str, dict[str, str]] = {}
    for group in sorted(group for group in entry_points().groups if group.startswith(_PREFIX)):
        entries = {entry.name: entry.value.replace("_", "-") for entry in entry_points(group=group)}
        points[group.removeprefix(_PREFIX)] = entries
    return points


def distribution_of(point: str, name: str) -> str:
    """The distribution that is known to offer this driver; "" for none."""
    return known_drivers().get(point, {}).get(name, "")


def known_distributions() -> set[str]:
    """Those that are known to offer a driver."""
    return {distribution for drivers in known_drivers().values() for distribution in drivers.values()}


def how_to_install(point: str) -> str:
    """A pip line for the drivers of a point, e.g. "pip install engine-a (or engine-b)"; where none is known, what to do
    instead."""
    distributions = [*dict.fromkeys(known_drivers().get(point, {}).values())]
    if not distributions:
        return f"install a distribution that offers a driver for {point}"
    first, *others = distributions
    return f"pip install {first}" + (f" (or {', '.join(others)})" if others else "")
