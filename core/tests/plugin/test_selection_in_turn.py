"""Drivers that are asked in turn, by kind of request."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from engine.interfaces.grammar import GrammarCard
from engine.plugin import Registry, choose
from engine.plugin.points import GRAMMAR
from engine.types.errors import ConfigError, DriverNotFoundError, OptionsError, PluginError, UnfitDriverError
from engine_inspect.why import explain

KINDS = dict.fromkeys(("choice", "regex", "json"))


class Wide(GrammarCard):
    priority = 5
    constraints = frozenset({"choice", "regex", "json"})

    class Options(BaseModel):
        depth: int = 1


class Narrow(GrammarCard):
    priority = 9
    constraints = frozenset({"json"})


class Plain(GrammarCard):
    priority = -1
    constraints = frozenset({"choice"})


class Nothing(GrammarCard):
    constraints = frozenset({"music"})


class Failing(GrammarCard):
    constraints = frozenset({"json"})

    @classmethod
    def unsupported(cls, need):
        raise RuntimeError("no")


ALL = {"wide": "Wide", "narrow": "Narrow", "plain": "Plain", "nothing": "Nothing", "failing": "Failing"}


@pytest.fixture
def registry(candidate):
    def make(*names):
        chosen = names or tuple(ALL)
        return Registry([candidate("grammar", name, f"{__name__}:{ALL[name]}") for name in chosen])

    return make


def turns(registry, asked=None, options=None):
    found: dict[str, list[str]] = {}
    for selection in choose(registry, GRAMMAR, KINDS, asked, options):
        found.setdefault(selection.kind, []).append(selection.candidate.name)
    return found


def test_auto_orders_by_priority_for_each_kind(registry):
    here = registry()
    assert turns(here) == {"choice": ["wide", "plain"], "regex": ["wide"], "json": ["narrow", "wide"]}
    assert [candidate.name for candidate in here.quarantine] == ["failing"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("plain", {"choice": ["plain"]}),
        ("plain,wide", {"choice": ["plain", "wide"], "regex": ["wide"], "json": ["wide"]}),
        ("plain,auto", {"choice": ["plain", "wide"], "regex": ["wide"], "json": ["narrow", "wide"]}),
        (" wide , auto ", {"choice": ["wide", "plain"], "regex": ["wide"], "json": ["wide", "narrow"]}),
    ],
)
def test_names_stand_for_themselves_and_auto_for_the_others(registry, asked, found):
    assert turns(registry(), asked) == found


def test_options_go_to_those_that_know_them(registry):
    chosen = choose(registry(), GRAMMAR, KINDS, None, {"depth": "3"})
    depths = {s.candidate.name: s.options and s.options.depth for s in chosen}
    assert depths == {"narrow": None, "wide": 3, "plain": None}
    with pytest.raises(OptionsError, match="depht"):
        turns(registry(), "wide", {"depht": 1})
    with pytest.raises(OptionsError, match="depth"):
        turns(registry(), "plain", {"depth": 1})


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ("wide,wide", ConfigError, "twice"),
        ("wide,wied", DriverNotFoundError, "did you mean 'wide'"),
        ("wide,nothing", UnfitDriverError, "it serves none of choice, regex, json"),
        ("failing", PluginError, "raised RuntimeError"),
    ],
)
def test_who_is_named_must_be_fit(registry, asked, error, words):
    with pytest.raises(error, match=words):
        turns(registry(), asked)


def test_nobody_serves_any_kind(registry):
    with pytest.raises(PluginError, match="nothing .*it serves none of"):
        turns(registry("nothing"))


def test_it_explains_itself_kind_by_kind(registry):
    here = registry()
    outcomes = explain(here, "grammar", choose(here, GRAMMAR, KINDS))
    said = {(o.candidate.name, o.verdict, o.kinds): o.reasons[0] for o in outcomes}
    assert said["narrow", "chosen", ("json",)] == "asked first (auto, priority 9)"
    assert said["wide", "chosen", ("choice", "regex")] == "asked first (auto, priority 5)"
    assert said["wide", "chosen", ("json",)] == "gets what 'narrow' refuses (auto, priority 5)"
    assert said["plain", "chosen", ("choice",)] == "gets what 'wide' refuses (auto, priority -1)"
    assert said["nothing", "unfit", ()].startswith("it serves none of")
    assert "RuntimeError" in said["failing", "broken", ()]
    outcomes = explain(here, "grammar", choose(here, GRAMMAR, KINDS, "plain"))
    said = {(o.candidate.name, o.verdict): o.reasons[0] for o in outcomes}
    assert said["plain", "chosen"] == "asked first (asked for)" and said["wide", "fits"] == "'plain' was asked for"
