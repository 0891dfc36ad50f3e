"""Choosing a driver that recognises the model: by priority, by name, or none at all."""

from __future__ import annotations

import pytest

from engine.interfaces.tool_parser import ToolParserCard, ToolParserNeed
from engine.plugin import Registry, select_recognised
from engine.plugin.explain import explain
from engine.types.errors import ConfigError, DriverNotFoundError, OptionsError, UnfitDriverError

NEED = ToolParserNeed(chat_template="<call>", architecture="Llama")


class Plain(ToolParserCard):
    @classmethod
    def recognises(cls, need):
        return "<call>" in need.chat_template


class Preferred(Plain):
    priority = 10


class Other(ToolParserCard):
    priority = 20


class Unfit(Plain):
    priority = 30

    @classmethod
    def unsupported(cls, need):
        return ["it is for another architecture"]


class Broken(Plain):
    priority = 40

    @classmethod
    def recognises(cls, need):
        raise RuntimeError("no")


@pytest.fixture
def registry(candidate):
    def build(**cards):
        found = [candidate("tool_parser", name, f"{card.__module__}:{card.__name__}") for name, card in cards.items()]
        return Registry(found)

    return build


def test_the_first_by_priority_that_recognises(registry):
    made = registry(plain=Plain, preferred=Preferred, other=Other, unfit=Unfit, broken=Broken)
    chosen = select_recognised(made, "tool_parser", NEED)
    assert chosen.candidate.name == "preferred" and not chosen.asked
    verdicts = {v.candidate.name: v.reasons for v in chosen.verdicts}
    assert verdicts["other"] == ("the model's chat template has nothing of its form",)
    assert verdicts["unfit"] == ("it is for another architecture",)
    assert [c.name for c in made.quarantine] == ["broken"] and "recognises() raised" in verdicts["broken"][0]
    said = {outcome.candidate.name: outcome.verdict for outcome in explain(made, "tool_parser", [chosen])}
    assert said == {"preferred": "chosen", "plain": "fits", "other": "unfit", "unfit": "unfit", "broken": "broken"}


def test_none_where_none_recognises_or_none_is_wanted(registry):
    assert select_recognised(registry(other=Other), "tool_parser", NEED) is None
    assert select_recognised(registry(), "tool_parser", NEED, "auto") is None
    assert select_recognised(registry(plain=Plain), "tool_parser", NEED, " none ") is None


def test_a_named_one_need_not_recognise_anything(registry):
    chosen = select_recognised(registry(plain=Plain, other=Other), "tool_parser", NEED, "other")
    assert chosen.candidate.name == "other" and chosen.asked
    with pytest.raises(UnfitDriverError, match="another architecture"):
        select_recognised(registry(unfit=Unfit), "tool_parser", NEED, "unfit")
    with pytest.raises(DriverNotFoundError, match="did you mean 'plain'"):
        select_recognised(registry(plain=Plain), "tool_parser", NEED, "plane")


def test_options_are_for_somebody(registry):
    for asked in (None, "none"):
        with pytest.raises(ConfigError, match="no tool_parser is at work"):
            select_recognised(registry(other=Other), "tool_parser", NEED, asked, {"x": 1})
    with pytest.raises(OptionsError, match="takes no options"):
        select_recognised(registry(plain=Plain), "tool_parser", NEED, None, {"x": 1})
