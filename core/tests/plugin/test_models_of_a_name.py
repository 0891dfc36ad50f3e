"""Drivers of one architecture by several hands: framework, fit and priority decide; then those for any architecture."""

from __future__ import annotations

from typing import Any

import pytest

from engine.interfaces.model import ModelCard, ModelNeed
from engine.plugin import Registry, Selection, choose
from engine.plugin.candidate import Candidate
from engine.plugin.manifest import check_choices, restore
from engine.plugin.points import ANY_ARCHITECTURE, MODEL
from engine.types.errors import (
    DriverImportError,
    DuplicateDriverError,
    ManifestError,
    UnfitDriverError,
    UnsupportedModelError,
)
from engine_inspect.why import explain
from engine_kit.chosen_drivers import why

NAME = "LlamaForCausalLM"


def card(priority: int = 0, framework: str | None = "torch", lacks: str = "", walks: bool = True) -> type[ModelCard]:
    unsupported = classmethod(lambda cls, need: [lacks] if lacks else [])
    return type(
        "Made",
        (ModelCard,),
        {"priority": priority, "framework": framework, "unsupported": unsupported, "walks": walks, "body": "none:None"},
    )


def registry(**cards: tuple[str, type[ModelCard] | None]) -> Registry:
    """By distribution: the driver's name and its card; None: it cannot be imported."""
    offered = {
        Candidate("model", name, 0, f"engine-{distribution}", "1.2", f"nowhere_{distribution}:Card"): made
        for distribution, (name, made) in cards.items()
    }
    found = Registry(list(offered))
    found._cards.update({candidate: made for candidate, made in offered.items() if made is not None})
    return found


def chosen(found: Registry, *architectures: str, asked: str | None = None, **need: Any) -> Selection[ModelCard]:
    needs = {name: ModelNeed(architecture=name, **need) for name in architectures or (NAME,)}
    (selection,) = choose(found, MODEL, needs, asked)
    return selection


def test_the_higher_priority_wins_and_the_other_fits() -> None:
    found = registry(fast=(NAME, card(10)), reference=(NAME, card()))
    for asked in (None, NAME):
        selection = chosen(found, asked=asked)
        assert (selection.candidate.distribution, selection.asked) == ("engine-fast", asked is not None)
    outcomes = explain(found, "model", [chosen(found)])
    assert [(o.candidate.distribution, o.verdict) for o in outcomes] == [
        ("engine-fast", "chosen"),
        ("engine-reference", "fits"),
    ]
    assert outcomes[1].reasons == ("that of engine-fast 1.2 has priority 10",)


def test_one_that_does_not_serve_the_config_is_passed_over() -> None:
    found = registry(fast=(NAME, card(10, lacks="no biases")), reference=(NAME, card()))
    selection = chosen(found)
    assert selection.candidate.distribution == "engine-reference"
    assert why([selection]) == "it has the model's architecture, priority 0; unfit: engine-fast 1.2: no biases"
    unfit = next(o for o in explain(found, "model", [selection]) if o.verdict == "unfit")
    assert unfit.candidate.distribution == "engine-fast" and unfit.reasons == ("no biases",)


def test_the_platform_s_framework_decides_before_the_priority() -> None:
    found = registry(jax=(NAME, card(10, "jax")), reference=(NAME, card()), slow=(NAME, card(-1, "jax")))
    assert chosen(found).candidate.distribution == "engine-reference"
    assert chosen(found, framework="jax").candidate.distribution == "engine-jax"
    only_torch = registry(reference=(NAME, card()))
    with pytest.raises(UnsupportedModelError, match="it computes with torch, the platform with jax"):
        chosen(only_torch, framework="jax")


def test_equal_frameworks_and_priorities_are_an_error_that_names_both() -> None:
    found = registry(mars=(NAME, card(5)), moon=(NAME, card(5, None)), reference=(NAME, card()))
    with pytest.raises(DuplicateDriverError, match=r"engine-mars 1\.2 and .*engine-moon 1\.2"):
        chosen(found)
    other = registry(mars=(NAME, card(5)), moon=(NAME, card(5, "jax")), reference=(NAME, card()))
    assert chosen(other).candidate.distribution == "engine-mars"


def test_a_broken_one_is_quarantined_where_another_serves() -> None:
    found = registry(mars=(NAME, None), reference=(NAME, card()))
    assert chosen(found).candidate.distribution == "engine-reference"
    assert [candidate.distribution for candidate in found.quarantine] == ["engine-mars"]
    for asked in (None, NAME):
        with pytest.raises(DriverImportError, match="nowhere_mars"):
            chosen(registry(mars=(NAME, None)), asked=asked)


def test_one_for_any_architecture_serves_what_no_other_does() -> None:
    found = registry(
        any=(ANY_ARCHITECTURE, card()),
        better=(ANY_ARCHITECTURE, card(5, lacks="it needs a GPU")),
        reference=(NAME, card(-10)),
    )
    assert chosen(found).candidate.distribution == "engine-reference"  # the priority counts among those of a name
    last = explain(found, "model", [chosen(found)])[1]
    assert last.candidate.distribution == "engine-any" and "for this architecture alone" in last.reasons[0]
    selection = chosen(found, "NewForCausalLM")
    assert selection.candidate.distribution == "engine-any" and "no driver at hand is for" in selection.reason
    refusing = registry(any=(ANY_ARCHITECTURE, card()), reference=(NAME, card(lacks="rope 'dynamic'")))
    assert chosen(refusing).candidate.distribution == "engine-any"
    assert chosen(refusing, asked=ANY_ARCHITECTURE).asked
    with pytest.raises(UnfitDriverError, match="rope 'dynamic'"):
        chosen(refusing, asked=NAME)  # whoever is named is not replaced


def test_one_for_any_architecture_is_not_imported_where_it_is_not_needed() -> None:
    found = registry(any=(ANY_ARCHITECTURE, None), other=("GPT2LMHeadModel", None), reference=(NAME, card()))
    assert chosen(found).candidate.distribution == "engine-reference" and not found.quarantine


def test_where_none_fits_all_say_why() -> None:
    found = registry(fast=(NAME, card(10, lacks="no biases")), reference=(NAME, card(lacks="no rope")))
    with pytest.raises(UnsupportedModelError, match=r"no biases.*no rope"):
        chosen(found)
    with pytest.raises(
        UnfitDriverError, match=r"engine-fast 1\.2 says: no biases | engine-reference 1\.2 says: no rope"
    ):
        chosen(found, asked=NAME)


def test_what_the_start_needs_of_a_body() -> None:
    found = registry(fast=(NAME, card(10, walks=False)), reference=(NAME, card()))
    assert chosen(found).candidate.distribution == "engine-fast"
    selection = chosen(found, features=frozenset({"stages"}))
    assert selection.candidate.distribution == "engine-reference"
    assert selection.verdicts[0].reasons == ("it does not serve stages, for its body does not walk its layers",)


def test_every_process_takes_the_one_that_the_launcher_chose() -> None:
    cards = {"fast": (NAME, card(10)), "reference": (NAME, card())}
    for distribution in ("engine-fast", "engine-reference"):
        here = registry(**cards)
        choice = chosen(registry(**{k: v for k, v in cards.items() if k in distribution})).choice()
        (restored,) = restore(here, [choice])
        assert restored.candidate.distribution == distribution
    with pytest.raises(ManifestError, match=r"is of engine-reference 1\.2 in the launcher, of engine-fast 1\.2 here"):
        check_choices(registry(fast=cards["fast"]), [choice])
