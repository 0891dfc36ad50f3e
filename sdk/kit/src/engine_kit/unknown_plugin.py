"""What is said of an entry of `--plugins` that names nothing installed (entry-point group `engine_parts`)."""

from __future__ import annotations

from collections.abc import Collection

from engine.plugin import Candidate
from engine.plugin.candidate import normal
from engine.plugin.hints import did_you_mean, distribution_of, known_drivers, near_matches
from engine.plugin.plugin_list import Entry
from engine.plugin.points import HOOKS, POINTS


def unknown_plugin(entry: Entry, found: Collection[Candidate], broken: Collection[str]) -> tuple[str, str]:
    """(what was found, what to do about it); "" where nothing resembles the name.

    Args:
        entry: of the list.
        found: every plugin that is installed.
        broken: distributions whose plugins cannot be read.
    """
    if entry.point:
        points = {*POINTS, HOOKS, *(candidate.point for candidate in found)}
        if entry.point not in points:
            hint = did_you_mean(entry.point, points) or f"the points are: {', '.join(sorted(points))}"
            return f"there is no point '{entry.point}'", hint
        drivers = [c.name for c in found if Entry("", False, entry.point, c.name).names(c)]
        listing = ", ".join(dict.fromkeys(drivers)) or "none"
        near = [f"'{entry.point}:{name}'" for name in near_matches(entry.name, drivers)]
        hint = f"did you mean {' or '.join(near)}?" if near else ""
        if distribution := distribution_of(entry.point, entry.name):
            hint = f"pip install {distribution}, or take it out of the list"
        return f"no installed distribution offers it; {entry.point} has: {listing}", hint
    distributions = {normal(name): name for name in (*broken, *(c.distribution for c in found))}
    as_driver = dict.fromkeys(
        f"{HOOKS if c.point.startswith(HOOKS) else c.point}:{c.name}" for c in found if normal(c.name) == entry.name
    )
    hint = did_you_mean(entry.name, distributions.values())
    if as_driver:
        hint = f"for the driver of that name write {' or '.join(as_driver)}"
    elif any(entry.name in drivers.values() for drivers in known_drivers().values()):
        hint = f"pip install {entry.name}, or take it out of the list"
    listing = ", ".join(sorted(distributions.values())) or "none"
    return f"no installed distribution of this name offers plugins; those that do: {listing}", hint
