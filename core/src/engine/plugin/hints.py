"""Hints for whoever gave a name that is not there: what it most likely meant, and what to install for it.

The core knows no driver. The distribution `engine` lists ours as entry points of groups `engine_known.POINT`: the
driver's name, and the package that offers it. They are read when an error is printed, and never loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.plugin.candidate import installed

_PREFIX = "engine_known."


def near_matches(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that resemble `name`, best first; case, dashes and underscores do not count."""
    from difflib import get_close_matches

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    by_plain: dict[str, str] = {}
    for candidate in known:
        by_plain.setdefault(plain(candidate), candidate)
    return [by_plain[match] for match in get_close_matches(plain(name), list(by_plain), n=limit, cutoff=0.6)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'a' or 'b'?", or an empty string where nothing resembles `name`."""
    matches = near_matches(name, known)
    return f"did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def known_drivers() -> Mapping[str, Mapping[str, str]]:
    """By point: driver to distribution, e.g. {"attention": {"flash": "engine-flashattn"}}."""
    return {
        group.removeprefix(_PREFIX): {entry.name: entry.value.replace("_", "-") for entry in entries}
        for group, entries in sorted(installed().others.items())
        if group.startswith(_PREFIX)
    }


def distribution_of(point: str, name: str) -> str:
    """The distribution that is known to offer this driver; "" for none."""
    return known_drivers().get(point, {}).get(name, "")


def how_to_install(point: str) -> str:
    """A pip line for the drivers of a point, e.g. "pip install engine-a (or engine-b)"; where none is known, what to do
    instead."""
    distributions = [*dict.fromkeys(known_drivers().get(point, {}).values())]
    if not distributions:
        return f"install a distribution that offers a driver for {point}"
    first, *others = distributions
    return f"pip install {first}" + (f" (or {', '.join(others)})" if others else "")
