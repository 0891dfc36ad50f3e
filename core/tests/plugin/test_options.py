"""Typed options: validated at start, errors name the field."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from engine.interfaces.evictor import EvictorCard
from engine.plugin import Registry, choose_one
from engine.plugin.points import EVICTOR
from engine.types.errors import OptionsError


class Plain(EvictorCard):
    pass


class Tunable(EvictorCard):
    class Options(BaseModel):
        share: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
        num_splits: int = Field(1, ge=1)
        order: str = "lru"
        sizes: list[int] = []
        bits: Literal[4, 8] = 8
        level: Literal["auto", 2, True] | None = None


class Demanding(EvictorCard):
    class Options(BaseModel):
        address: str


@pytest.fixture
def registry(candidate):
    cards = {"plain": "Plain", "tunable": "Tunable", "demanding": "Demanding"}
    return Registry([candidate("evictor", n, f"{__name__}:{c}", f"dist-{n}") for n, c in cards.items()])


def choose(registry, driver, options=None):
    return choose_one(registry, EVICTOR, None, driver, options).options


def test_strings_of_a_command_line_become_typed(registry):
    options = choose(registry, "tunable", {"num_splits": "4", "order": "7", "sizes": [1, "2"]})
    assert (options.num_splits, options.order, options.sizes) == (4, "7", [1, 2])


@pytest.mark.parametrize(
    ("given", "meant"), [("4", 4), (8, 8), ("auto", "auto"), ("2", 2), ("true", True), (None, None)]
)
def test_strings_of_a_command_line_become_choices(registry, given, meant):
    name = "bits" if meant in (4, 8) else "level"
    found = getattr(choose(registry, "tunable", {name: given}), name)
    assert found == meant and type(found) is type(meant)


def test_a_choice_that_there_is_not_names_those_that_there_are(registry):
    with pytest.raises(OptionsError) as caught:
        choose(registry, "tunable", {"bits": "5"})
    assert "'5'" in caught.value.found and "bits (4 or 8, default 8)" in caught.value.remedy


def test_defaults_and_none(registry):
    assert choose(registry, "tunable").num_splits == 1
    assert choose(registry, "plain") is None


def test_unknown_option_has_near_matches(registry):
    with pytest.raises(OptionsError) as caught:
        choose(registry, "tunable", {"num_split": 4})
    assert caught.value.remedy == "did you mean 'num_splits'?"
    assert "evictor.num_split" in caught.value.asked and "dist-tunable 1.0" in caught.value.found


def test_bad_value_names_the_field_the_value_and_the_driver(registry):
    with pytest.raises(OptionsError) as caught:
        choose(registry, "tunable", {"num_splits": "0", "order": "x"})
    assert "num_splits" in caught.value.found and "'0'" in caught.value.found and "order" not in caught.value.found
    assert caught.value.driver == "tunable"


def test_all_that_an_option_takes_is_named(registry):
    with pytest.raises(OptionsError) as caught:
        choose(registry, "tunable", {"share": "x"})
    listing = "share (float or 'auto', default 'auto'), num_splits (int, default 1), order (str, default 'lru'), "
    listing += "sizes (list, default []), bits (4 or 8, default 8), level ('auto' or 2 or True or None, default None)"
    assert caught.value.remedy == f"its options: {listing}"


def test_a_required_option_that_is_missing(registry):
    with pytest.raises(OptionsError, match="address"):
        choose(registry, "demanding")


def test_options_for_a_driver_that_takes_none(registry):
    with pytest.raises(OptionsError, match="takes no options"):
        choose(registry, "plain", {"num_splits": 4})


def test_options_of_a_driver_that_was_not_chosen(registry):
    with pytest.raises(OptionsError, match="'demanding'.*has no such option"):
        choose(registry, "demanding", {"num_splits": 4, "address": "x"})
