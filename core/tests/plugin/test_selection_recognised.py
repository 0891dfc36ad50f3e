"""Choosing a driver that recognises the model: by priority, by name, or none at all."""

from __future__ import annotations

import pytest

from engine.interfaces.tool_parser import ToolParserCard, ToolParserNeed
from engine.plugin import Registry, choose
from engine.plugin.points import TOOL_PARSER
from engine.types.errors import ConfigError, DriverNotFoundError, OptionsError, UnfitDriverError
from engine_inspect.why import explain

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
    (chosen,) = choose(made, TOOL_PARSER, {"": NEED})
    assert chosen.candidate.name == "preferred" and not chosen.asked
    verdicts = {v.candidate.name: v.reasons for v in chosen.verdicts}
    assert verdicts["other"] == ("the model's chat template has nothing of its form",)
    assert verdicts["unfit"] == ("it is for another architecture",)
    assert [c.name for c in made.quarantine] == ["broken"] and "recognises() raised" in verdicts["broken"][0]
    said = {outcome.candidate.name: outcome.verdict for outcome in explain(made, "tool_parser", [chosen])}
    assert said == {"preferred": "chosen", "plain": "fits", "other": "unfit", "unfit": "unfit", "broken": "broken"}


def test_none_where_none_recognises_or_none_is_wanted(registry):
    assert choose(registry(other=Other), TOOL_PARSER, {"": NEED}) == []
    assert choose(registry(), TOOL_PARSER, {"": NEED}, "auto") == []
    assert choose(registry(plain=Plain), TOOL_PARSER, {"": NEED}, " none ") == []


def test_a_named_one_need_not_recognise_anything(registry):
    (chosen,) = choose(registry(plain=Plain, other=Other), TOOL_PARSER, {"": NEED}, "other")
    assert chosen.candidate.name == "other" and chosen.asked
    with pytest.raises(UnfitDriverError, match="another architecture"):
        choose(registry(unfit=Unfit), TOOL_PARSER, {"": NEED}, "unfit")
    with pytest.raises(DriverNotFoundError, match="did you mean 'plain'"):
        choose(registry(plain=Plain), TOOL_PARSER, {"": NEED}, "plane")


def test_options_are_for_somebody(registry):
    for asked in (None, "none"):
        with pytest.raises(ConfigError, match="no tool_parser is at work"):
            choose(registry(other=Other), TOOL_PARSER, {"": NEED}, asked, {"x": 1})
    with pytest.raises(OptionsError, match="takes no options"):
        choose(registry(plain=Plain), TOOL_PARSER, {"": NEED}, None, {"x": 1})
