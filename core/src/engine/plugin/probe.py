"""One card, imported in a process of its own, where what hangs, crashes or leaves harms nobody.

    python -m engine.plugin.probe POINT NAME MAJOR VALUE DISTRIBUTION VERSION

prints one line of JSON, see `Finding`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import NamedTuple

from engine.plugin.discovery import Candidate, Registry
from engine.plugin.loading import load_entry_point
from engine.plugin.points import POINTS
from engine.types.errors import PluginError

HEAVY = ("torch", "transformers", "jax", "tensorflow", "triton")
"""Modules that a card must not import: `engine plugins why` and the start would wait for them."""


class Finding(NamedTuple):
    """What a probe saw.

    Attributes:
        seconds: that the import took.
        heavy: modules of `HEAVY` that it brought.
        found, remedy: what is wrong with the card; empty where nothing is.
    """

    seconds: float
    heavy: list[str]
    found: str = ""
    remedy: str = ""


def probe(candidate: Candidate) -> Finding:
    """Import what the candidate names: a card is also checked against its point's interface."""
    if candidate.point in POINTS:  # what every card of the point needs is not counted as this card's
        importlib.import_module(POINTS[candidate.point].interface.partition(":")[0])
    started, found, remedy = time.perf_counter(), "", ""
    try:
        if candidate.point in POINTS:
            Registry(found=[candidate]).card(candidate)
        else:
            load_entry_point(candidate)
    except PluginError as error:
        found, remedy = error.found, error.remedy
    seconds = time.perf_counter() - started
    return Finding(seconds, [name for name in HEAVY if name in sys.modules], found, remedy)


if __name__ == "__main__":
    point, name, major, value, distribution, version = sys.argv[1:]
    print(json.dumps(probe(Candidate(point, name, int(major), distribution, version, value))))
