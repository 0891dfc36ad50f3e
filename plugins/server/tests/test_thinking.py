"""How much a model thinks, by the variables that its chat template takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.types.errors import TokenizerError
from engine_server.conversation.tools import ToolRequest
from engine_server.conversation.turn import Conversation, with_documents, with_effort, without_thoughts
from engine_server.errors import APIError


def state(*takes: str, thinks: bool = True) -> Any:
    """With a template that writes these variables into the prompt."""

    def render_chat(messages: Any, variables: Any) -> str:
        rendered.append(variables)
        return f"{messages} {[(name, variables[name]) for name in takes if name in variables]}"

    rendered: list[Any] = []
    engine = SimpleNamespace(inputs=SimpleNamespace(render_chat=render_chat), reasoning_parser=thinks or None)
    return SimpleNamespace(engine=engine, told_apart={}, rendered=rendered)


SAID = Conversation(messages=[{"role": "user", "content": "Hi"}], tools=ToolRequest(), variables={"mine": 1})


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "max"])
def test_a_template_that_takes_an_effort(effort: Any) -> None:
    said = with_effort(state("reasoning_effort"), SAID, effort, "reasoning_effort")
    assert said.variables == {"mine": 1, "reasoning_effort": effort}
    assert with_effort(state(), SAID, None, "reasoning_effort") == SAID


def test_no_effort_is_the_switch_against_thoughts() -> None:
    for takes in ("enable_thinking", "thinking"):
        said = with_effort(state(takes), SAID, "none", "reasoning_effort")
        assert said.variables is not None and said.variables[takes] is False
    assert without_thoughts(state(thinks=False), SAID, "thinking") == SAID


@pytest.mark.parametrize(("effort", "takes"), [("high", "enable_thinking"), ("none", "reasoning_effort")])
def test_a_template_that_does_not(effort: Any, takes: str) -> None:
    with pytest.raises(APIError) as caught:
        with_effort(state(takes), SAID, effort, "reasoning.effort")
    assert (caught.value.param, caught.value.code) == ("reasoning", "unsupported_parameter")


def test_documents_where_the_template_shows_them() -> None:
    documents = [{"title": "a", "text": "b"}]
    said = with_documents(state("documents"), SAID, documents)
    assert said.variables == {"mine": 1, "documents": documents}
    assert with_documents(state(), SAID, None) == SAID
    with pytest.raises(APIError, match="does not show them"):
        with_documents(state(), SAID, documents)


def test_what_a_template_tells_apart_is_found_once() -> None:
    takes = state("reasoning_effort")
    for _ in range(3):
        with_effort(takes, SAID, "high", "reasoning_effort")
        with pytest.raises(APIError):
            without_thoughts(takes, SAID, "thinking")
    assert len(takes.rendered) == 4


def test_no_template_tells_nothing_apart() -> None:
    def render_chat(messages: Any, variables: Any) -> str:
        raise TokenizerError("render", "there is no template")

    none = state("reasoning_effort")
    none.engine.inputs.render_chat = render_chat
    with pytest.raises(APIError):
        with_effort(none, SAID, "high", "reasoning_effort")
