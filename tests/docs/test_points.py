"""Every point and hook is described, and each point has a suite and two drivers, or what it lacks is written down."""

from __future__ import annotations

import re

import pytest

from engine.plugin import POINTS, Registry
from engine.plugin.hookspecs import HOOKSPECS
from engine_sdk.conformance import SUITES
from tests.docs.markdown import ROOT

PENDING = ROOT / "docs" / "pending-points.md"


def text(name: str) -> str:
    return (ROOT / "docs" / "plugins" / name).read_text(encoding="utf-8")


def missing() -> dict[str, str]:
    """What keeps each point from version 1: a suite, drivers by two hands."""
    registry, found = Registry.discover(), {}
    for point in POINTS:
        cards = {candidate.value for candidate in registry.candidates(point)}
        parts = [*(["a suite"] if point not in SUITES else []), *(["a second driver"] if len(cards) < 2 else [])]
        if parts:
            found[point] = ", ".join(parts)
    return found


def test_what_is_missing_is_written_down() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PENDING.read_text(encoding="utf-8"), re.MULTILINE)
    assert {point: parts.strip() for point, parts in rows} == missing()


@pytest.mark.parametrize("point", POINTS)
def test_every_point_is_described(point: str) -> None:
    assert f"\n## {point}\n" in text("interfaces.md") and f"[{point}]" in text("interfaces.md")
    assert len(POINTS[point].help) > 20


@pytest.mark.parametrize("process", HOOKSPECS)
def test_every_hook_is_described(process: str) -> None:
    for name, hook in vars(HOOKSPECS[process]).items():
        if not name.startswith("_"):
            assert f"`{name}`" in text("hooks.md")
            assert len(hook.__doc__ or "") > 40, name


def test_suites_are_of_points() -> None:
    assert set(SUITES) <= set(POINTS)
