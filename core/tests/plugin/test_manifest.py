"""The manifest: plain strings that every process checks."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from engine.interfaces.evictor import EvictorCard
from engine.plugin import Registry, choose_one
from engine.plugin.manifest import Blame, check_choices, restore
from engine.plugin.points import EVICTOR
from engine.types.errors import ContractError, EngineDeadError, ManifestError
from engine.types.start import Choice


class Mine(EvictorCard):
    class Options(BaseModel):
        depth: int = 3


@pytest.fixture
def driver(candidate):
    return candidate("evictor", "mine", f"{__name__}:Mine", "dist-mine")


@pytest.fixture
def choice(driver):
    return choose_one(Registry([driver]), EVICTOR, None, "mine", {"depth": "5"}).choice()


def test_it_is_plain_strings_and_comes_back_from_json(choice):
    data = json.loads(msgspec.json.encode(choice))
    assert data | {"value": "", "asked": False} == {
        "point": "evictor",
        "kind": "",
        "driver": "mine",
        "distribution": "dist-mine",
        "version": "1.0",
        "value": "",
        "options": {"depth": 5},
        "asked": False,
    }
    assert msgspec.json.decode(msgspec.json.encode(choice), type=Choice) == choice


def test_the_same_installation_passes_without_import(driver, choice):
    unimportable = dataclasses.replace(driver, value="pg_nowhere:Mine")
    check_choices(Registry([unimportable]), [replace(choice, value="pg_nowhere:Mine")])


def test_restore_gives_the_selections_with_their_options(driver, choice):
    [selection] = restore(Registry([driver]), [choice])
    assert selection.card is Mine and selection.options.depth == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "2.0"}, "of dist-mine 1.0 in the launcher, of dist-mine 2.0 here"),
        ({"distribution": "fork"}, "of dist-mine 1.0 in the launcher, of fork 1.0 here"),
        ({"value": "elsewhere:Mine"}, "elsewhere:Mine here"),
        ({"name": "yours"}, "cannot be used here"),
        ({"major": 7}, "cannot be used here"),
    ],
)
def test_another_installation_is_an_error_that_names_the_difference(driver, choice, change, says):
    with pytest.raises(ManifestError) as caught:
        check_choices(Registry([dataclasses.replace(driver, **change)]), [choice])
    assert says in caught.value.found and "evictor 'mine'" in caught.value.found


def test_all_differences_are_named(driver, choice):
    with pytest.raises(ManifestError, match=r"'mine'.*; evictor 'gone'"):
        check_choices(Registry([dataclasses.replace(driver, version="9")]), [choice, replace(choice, driver="gone")])


def test_an_error_against_a_driver_at_work_names_it_and_its_distribution(choice):
    blame, bare = Blame([choice]), ContractError("2 pages", "the evictor gave 3", "another", point="evictor")
    with pytest.raises(ContractError) as caught, blame:
        raise bare
    error = caught.value
    assert str(error) == "2 pages; the evictor gave 3 (driver 'mine' for evictor, of dist-mine 1.0); another"
    assert (error.point, error.driver, error.distribution, error.__cause__) == (
        "evictor",
        "mine",
        "dist-mine 1.0",
        bare,
    )
    others = [error, EngineDeadError("x"), ContractError("of another point", point="router"), KeyError(1)]
    assert [blame.named(other) for other in others] == others
    with blame, pytest.raises(KeyError):
        raise KeyError
