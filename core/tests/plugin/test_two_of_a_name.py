"""Two distributions that offer one name: an error for whoever would get it, and for nobody else, with every pick."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.plugin import (
    POINTS,
    Registry,
    Selection,
    select,
    select_architecture,
    select_claims,
    select_default_model,
    select_fitting,
    select_in_turn,
    select_kinds,
    select_ordered,
    select_recognised,
    select_set,
)
from engine.plugin.discovery import Candidate
from engine.plugin.explain import explain
from engine.process.importing import import_object
from engine.types.errors import DuplicateDriverError, PluginError


def card(point: str, priority: int, fits: bool) -> type:
    """A card that serves everything at its point, or nothing."""
    return type(
        "Made",
        (import_object(POINTS[point].interface),),
        {
            "priority": priority,
            "kinds": frozenset({"full"}),
            "operations": frozenset({"linear"}),
            "constraints": frozenset({"json"}),
            "parameters": frozenset({"bias"}),
            "default_model": "mine" if fits else None,
            "claims": classmethod(lambda cls, name: fits),
            "recognises": classmethod(lambda cls, need: fits),
            "unsupported": classmethod(lambda cls, need: [] if fits else ["it rains"]),
        },
    )


def registry(point: str, first: bool, twins: tuple[bool, bool], above: bool) -> Registry:
    """`first` alone by its name, and two of one name: do they fit, and are these asked before it?"""
    offered = {"engine": ("first", 0, first)}
    for distribution, fits in zip(("engine-mars", "engine-moon"), twins, strict=True):
        offered[distribution] = "twin", 5 if above else -5, fits
    made = Registry([Candidate(point, name, 0, dist, "1.2", f"x:{dist}") for dist, (name, _, _) in offered.items()])
    for candidate in made.found:
        _, priority, fits = offered[candidate.distribution]
        made._cards[candidate] = card(point, priority, fits)
    return made


def listed(selection: Selection | None) -> list[Selection]:
    return [] if selection is None else [selection]


PICKS: dict[str, tuple[str, Callable[[Registry], Sequence[Selection]]]] = {
    "one": ("evictor", lambda r: [select(r, "evictor", None)]),
    "ordered": ("ops", lambda r: select_ordered(r, "ops", {"linear": None})),
    "per kind": ("attention", lambda r: select_kinds(r, "attention", {"full": None})),
    "recognises": ("tool_parser", lambda r: listed(select_recognised(r, "tool_parser", None))),
    "many": ("logits_processor", lambda r: select_set(r, "logits_processor", None, ["bias"])),
    "fitting": ("communicator", lambda r: select_fitting(r, "communicator", None)),
    "in turn": ("grammar", lambda r: select_in_turn(r, "grammar", None, ["json"])),
    "claims": ("checkpoint", lambda r: [select_claims(r, "checkpoint", "mine")]),
    "default model": ("checkpoint", lambda r: [select_default_model(r)[0]]),
}
ALL_ARE_TAKEN = ("fitting", "in turn")
ALL_ARE_ASKED = (*ALL_ARE_TAKEN, "claims", "default model")


@pytest.mark.parametrize("pick", PICKS)
def test_auto_stops_where_it_would_take_one_of_them(pick: str) -> None:
    point, choose = PICKS[pick]
    for twins in ((True, True), (True, False)):
        with pytest.raises(DuplicateDriverError, match=r"engine-mars 1\.2 and .* engine-moon 1\.2"):
            choose(registry(point, True, twins, above=True))
        with pytest.raises(DuplicateDriverError):
            choose(registry(point, False, twins, above=False))


@pytest.mark.parametrize("pick", PICKS)
def test_auto_goes_on_where_it_would_not(pick: str) -> None:
    point, choose = PICKS[pick]
    below = () if pick in ALL_ARE_ASKED else ((registry(point, True, (True, True), above=False)),)
    for here in (registry(point, True, (False, False), above=True), *below):
        assert [selection.candidate.name for selection in choose(here)] == ["first"]
        twins = [o for o in explain(here, point, choose(here)) if o.candidate.name == "twin"]
        assert [outcome.verdict for outcome in twins] == ["duplicate", "duplicate"]
        assert all("engine-mars 1.2 and" in outcome.reasons[0] for outcome in twins)


@pytest.mark.parametrize("pick", ALL_ARE_TAKEN)
def test_where_all_that_fit_are_at_work_one_of_them_would_be(pick: str) -> None:
    point, choose = PICKS[pick]
    with pytest.raises(DuplicateDriverError):
        choose(registry(point, True, (True, False), above=False))


def test_a_model_s_driver_is_found_by_its_name() -> None:
    here = registry("model", True, (True, True), above=True)
    assert select_architecture(here, ["first"], None).candidate.name == "first"
    with pytest.raises(DuplicateDriverError):
        select_architecture(here, ["twin"], None)


def test_a_broken_one_is_still_one_of_two() -> None:
    here = registry("evictor", True, (True, True), above=True)
    (mars,) = (candidate for candidate in here.found if candidate.distribution == "engine-mars")
    here.quarantine[mars] = PluginError("use it", "it is broken")
    with pytest.raises(DuplicateDriverError):
        select(here, "evictor", None)
