"""How much a model thinks, by the variables that its chat template takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_server.conversation.thinking import with_documents, with_effort, without_thoughts
from engine_server.conversation.tools import ToolRequest
from engine_server.conversation.turn import Conversation
from engine_server.errors import APIError


def state(*takes: str, thinks: bool = True) -> Any:
    """With a template that writes these variables into the prompt, and notes what it was asked."""
    rendered: list[Any] = []

    async def render_chat(messages: Any, *, variables: Any, **_: Any) -> Any:
        rendered.append(variables)
        shown = {name: value for name, value in (variables or {}).items() if name in takes}
        return {"prompt": f"{messages} {sorted(shown.items())}", "add_special_tokens": False}

    return SimpleNamespace(
        engine=SimpleNamespace(render_chat=render_chat, reasoning_parser=thinks or None), shown={}, rendered=rendered
    )


SAID = Conversation(messages=[{"role": "user", "content": "Hi"}], tools=ToolRequest(), variables={"mine": 1})


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "max"])
async def test_a_template_that_takes_an_effort(effort: Any) -> None:
    said = await with_effort(state("reasoning_effort"), SAID, effort, "reasoning_effort")
    assert said.variables == {"mine": 1, "reasoning_effort": effort}
    assert await with_effort(state(), SAID, None, "reasoning_effort") == SAID


async def test_no_effort_is_the_switch_against_thoughts() -> None:
    for takes in ("enable_thinking", "thinking"):
        said = await with_effort(state(takes), SAID, "none", "reasoning_effort")
        assert said.variables is not None and said.variables[takes] is False
    assert await without_thoughts(state(thinks=False), SAID, "thinking") == SAID


@pytest.mark.parametrize(("effort", "takes"), [("high", "enable_thinking"), ("none", "reasoning_effort")])
async def test_a_template_that_does_not(effort: Any, takes: str) -> None:
    with pytest.raises(APIError) as caught:
        await with_effort(state(takes), SAID, effort, "reasoning.effort")
    assert (caught.value.param, caught.value.code) == ("reasoning", "unsupported_parameter")


async def test_documents_where_the_template_shows_them() -> None:
    documents = [{"title": "a", "text": "b"}]
    said = await with_documents(state("documents"), SAID, documents)
    assert said.variables == {"mine": 1, "documents": documents}
    assert await with_documents(state(), SAID, None) == SAID
    with pytest.raises(APIError, match="does not show them"):
        await with_documents(state(), SAID, documents)


async def test_the_template_is_tried_once() -> None:
    found = state("reasoning_effort")
    for effort in ("low", "high", "low"):
        await with_effort(found, SAID, effort, "reasoning_effort")  # type: ignore[arg-type]
    assert found.rendered == [{"reasoning_effort": "low"}, {"reasoning_effort": "high"}]
