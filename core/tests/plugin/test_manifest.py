"""The manifest: plain strings that every process checks."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from pydantic import BaseModel

from engine.interfaces.evictor import EvictorCard
from engine.plugin import Manifest, Registry, choose_one
from engine.plugin.manifest import Blame
from engine.plugin.points import EVICTOR
from engine.types.errors import ContractError, EngineDeadError, ManifestError


class Mine(EvictorCard):
    class Options(BaseModel):
        depth: int = 3


@pytest.fixture
def driver(candidate):
    return candidate("evictor", "mine", f"{__name__}:Mine", "dist-mine")


@pytest.fixture
def manifest(driver):
    return Manifest.of([choose_one(Registry([driver]), EVICTOR, None, "mine", {"depth": "5"})])


def test_it_is_plain_strings_and_comes_back_from_json(manifest):
    data = json.loads(msgspec.json.encode(manifest))
    assert data["choices"][0] | {"value": "", "asked": False} == {
        "point": "evictor",
        "kind": "",
        "driver": "mine",
        "distribution": "dist-mine",
        "version": "1.0",
        "value": "",
        "options": {"depth": 5},
        "asked": False,
    }
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest


def test_the_same_installation_passes_without_import(driver, manifest):
    unimportable = replace(driver, value="pg_nowhere:Mine")
    Manifest((_with(manifest, value="pg_nowhere:Mine"),)).check(Registry([unimportable]))


def test_restore_gives_the_selections_with_their_options(driver, manifest):
    [selection] = manifest.restore(Registry([driver]))
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
def test_another_installation_is_an_error_that_names_the_difference(driver, manifest, change, says):
    with pytest.raises(ManifestError) as caught:
        manifest.check(Registry([replace(driver, **change)]))
    assert says in caught.value.found and "evictor 'mine'" in caught.value.found


def test_all_differences_are_named(driver, manifest):
    twice = Manifest((*manifest.choices, _with(manifest, driver="gone")))
    with pytest.raises(ManifestError, match=r"'mine'.*; evictor 'gone'"):
        twice.check(Registry([replace(driver, version="9")]))


def _with(manifest, **change):
    return msgspec.structs.replace(manifest.choices[0], **change)


def test_an_error_against_a_driver_at_work_names_it_and_its_distribution(manifest):
    blame, bare = Blame(manifest.choices), ContractError("2 pages", "the evictor gave 3", "another", point="evictor")
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
