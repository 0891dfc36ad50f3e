"""Two distributions that offer one name: an error for whoever would get it, and for nobody else, with every pick."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.interfaces.model import ModelNeed
from engine.plugin import POINTS, Registry, Selection, choose, choose_one
from engine.plugin.candidate import Candidate
from engine.plugin.choosing import default_model
from engine.plugin.loading import import_object
from engine.plugin.points import CHECKPOINT, EVICTOR, MODEL
from engine.types.errors import DuplicateDriverError, PluginError
from engine_inspect.why import explain


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


PICKS: dict[str, tuple[str, str, object]] = {
    "one": ("evictor", "", None),
    "ordered": ("ops", "linear", None),
    "per kind": ("attention", "full", None),
    "recognises": ("tool_parser", "", None),
    "many": ("logits_processor", "bias", None),
    "all": ("communicator", "", None),
    "in turn": ("grammar", "json", None),
    "claims": ("checkpoint", "", "mine"),
}
"""Point, and what it is asked: a kind and a need."""


def choice(pick: str) -> tuple[str, Callable[[Registry], Sequence[Selection]]]:
    """The point, and what chooses."""
    point, kind, need = PICKS[pick]
    return point, lambda registry: choose(registry, POINTS[point], {kind: need})


ALL_ARE_TAKEN = ("all", "in turn")
ALL_ARE_ASKED = (*ALL_ARE_TAKEN, "claims")


@pytest.mark.parametrize("pick", PICKS)
def test_auto_stops_where_it_would_take_one_of_them(pick: str) -> None:
    point, chosen = choice(pick)
    for twins in ((True, True), (True, False)):
        with pytest.raises(DuplicateDriverError, match=r"engine-mars 1\.2 and .* engine-moon 1\.2"):
            chosen(registry(point, True, twins, above=True))
        with pytest.raises(DuplicateDriverError):
            chosen(registry(point, False, twins, above=False))


@pytest.mark.parametrize("pick", PICKS)
def test_auto_goes_on_where_it_would_not(pick: str) -> None:
    point, chosen = choice(pick)
    below = () if pick in ALL_ARE_ASKED else ((registry(point, True, (True, True), above=False)),)
    for here in (registry(point, True, (False, False), above=True), *below):
        assert [selection.candidate.name for selection in chosen(here)] == ["first"]
        twins = [o for o in explain(here, point, chosen(here)) if o.candidate.name == "twin"]
        assert [outcome.verdict for outcome in twins] == ["duplicate", "duplicate"]
        assert all("engine-mars 1.2 and" in outcome.reasons[0] for outcome in twins)


@pytest.mark.parametrize("pick", ALL_ARE_TAKEN)
def test_where_all_that_fit_are_at_work_one_of_them_would_be(pick: str) -> None:
    point, chosen = choice(pick)
    with pytest.raises(DuplicateDriverError):
        chosen(registry(point, True, (True, False), above=False))


def test_a_model_s_driver_is_found_by_its_name() -> None:
    here = registry("model", True, (True, True), above=True)
    need = ModelNeed(architecture="first", config={})
    assert [selection.candidate.name for selection in choose(here, MODEL, {"first": need})] == ["first"]
    with pytest.raises(DuplicateDriverError):
        choose(here, MODEL, {"twin": need})


def test_a_default_model_is_one_driver_s() -> None:
    for twins in ((True, True), (True, False)):
        with pytest.raises(DuplicateDriverError):
            default_model(registry("checkpoint", True, twins, above=True), CHECKPOINT)
    assert default_model(registry("checkpoint", True, (False, False), above=True), CHECKPOINT).name == "mine"


def test_a_broken_one_is_still_one_of_two() -> None:
    here = registry("evictor", True, (True, True), above=True)
    (mars,) = (candidate for candidate in here.found if candidate.distribution == "engine-mars")
    here.quarantine[mars] = PluginError("use it", "it is broken")
    with pytest.raises(DuplicateDriverError):
        choose_one(here, EVICTOR, None)
