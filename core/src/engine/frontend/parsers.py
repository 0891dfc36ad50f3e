"""Which parsers read what the model writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from engine.interfaces.reasoning_parser import ReasoningParserNeed
from engine.interfaces.tokenizer import TokenizerCard
from engine.interfaces.tool_parser import ToolParserNeed
from engine.plugin import Registry, Selection, select_recognised
from engine.types.errors import TokenizerError

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig
    from engine.types.model import ModelDescription

_TOOLS = re.compile(r"\btools\b")


def parser_needs(
    tokenizer: Selection, folder: str, model: ModelDescription, given: str | None = None
) -> dict[str, ToolParserNeed | ReasoningParserNeed]:
    """What is asked of a tool parser and of a reasoning parser, by point.

    Args:
        tokenizer: the tokenizer's driver, which knows the chat template.
        folder: where its files lie.
        given: a template in place of the model's.
    """
    tooled, plain = (template_source(tokenizer, folder, with_tools, given) for with_tools in (True, False))
    return {
        "tool_parser": ToolParserNeed(chat_template=tooled, architecture=model.architecture),
        "reasoning_parser": ReasoningParserNeed(chat_template=plain, architecture=model.architecture),
    }


def choose_parsers(config: EngineConfig, registry: Registry, needs: Mapping[str, object]) -> tuple[Selection, ...]:
    """The tool parser and the reasoning parser: those that are named, or that recognise the model's chat template.

    Raises PluginError for a parser that was named, ConfigError for options that nobody takes.
    """
    chosen = [
        select_recognised(registry, point, need, config.asked(point), config.options_for(point))
        for point, need in needs.items()
    ]
    return tuple(selection for selection in chosen if selection is not None)


def renders_tools(tokenizer: Selection, folder: str, given: str | None = None) -> bool:
    """Whether the chat template has a place for tools; True where the tokenizer's card does not tell it.

    Args:
        tokenizer, folder, given: see `parser_needs`.
    """
    template = template_source(tokenizer, folder, True, given)
    return not template or _TOOLS.search(template) is not None


def template_source(tokenizer: Selection, folder: str, with_tools: bool, given: str | None) -> str:
    """The source of the chat template, with tools or without; "" where there is none, or the card does not tell it."""
    if given is not None:
        return given
    try:
        return cast("type[TokenizerCard]", tokenizer.card).chat_template(folder, with_tools)
    except TokenizerError:  # the tokenizer's body will say it: there, and not here, the files are needed
        return ""
