"""`instructor` around the official client, unmodified: pydantic models out of answers, in its modes for OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import pytest
from instructor import Mode
from instructor.v2.core.errors import InstructorRetryException
from pydantic import BaseModel, Field, field_validator

from .conftest import Server

pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about Rome"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_retries": 0}
SCHEMED = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS]
"""The modes in which the server makes sure of the schema."""


class Place(BaseModel):
    """Some place."""

    city: Literal["Paris", "Rome"] = Field(description="which it is")
    large: bool


class Name(BaseModel):
    """What the bundled model says where it is only asked for JSON."""

    name: str


def wrapped(server: Server, mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(server.client(), mode=mode)


@pytest.mark.parametrize("mode", SCHEMED)
def test_made_and_streamed(server: Server, mode: Mode) -> None:
    create = wrapped(server, mode).chat.completions
    made = create.create(response_model=Place, **OPTIONS)
    assert isinstance(made, Place) and made.city == "Rome"
    parts = list(create.create_partial(response_model=Place, **OPTIONS))
    assert parts[-1].model_dump() == made.model_dump()


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_several(server: Server, mode: Mode) -> None:
    create = wrapped(server, mode).chat.completions
    found = list(create.create_iterable(response_model=Place, max_tokens=300, **OPTIONS))
    assert found and all(isinstance(place, Place) for place in found)


def test_json(server: Server) -> None:
    """The schema is in the prompt alone, and the server makes sure of JSON."""
    create = wrapped(server, Mode.JSON).chat.completions
    assert create.create(response_model=Name, **OPTIONS).name == "Rome"
    parts = list(create.create_partial(response_model=Name, **OPTIONS))
    assert parts[-1].name == "Rome"


def test_calls_that_the_model_may_leave(server: Server) -> None:
    class get_weather(BaseModel):
        """Get the weather"""

        city: str

    create = wrapped(server, Mode.PARALLEL_TOOLS).chat.completions
    asked = {**OPTIONS, "messages": [{"role": "user", "content": "What is the weather in Rome?"}]}
    assert [call.city for call in create.create(response_model=Iterable[get_weather], **asked)] == ["Rome"]


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_retried(server: Server, mode: Mode) -> None:
    """What its validators refuse goes back to the model, with the call and what was wrong, until they take it."""
    seen: list[str] = []

    class Picky(Place):
        @field_validator("city")
        @classmethod
        def at_the_third(cls, city: str) -> str:
            seen.append(city)
            if len(seen) < 3:
                raise ValueError("not this one, try again")
            return city

    client = wrapped(server, mode)
    sent: list[Any] = []
    client.on("completion:kwargs", lambda *_, **given: sent.append(list(given["messages"])))
    made = client.chat.completions.create(response_model=Picky, **{**OPTIONS, "max_retries": 3})
    assert made.city == seen[-1] and len(seen) == 3
    assert len(sent) == 3 and len(sent[0]) < len(sent[1]) < len(sent[2])
    seen.clear()
    with pytest.raises(InstructorRetryException):
        client.chat.completions.create(response_model=Picky, **{**OPTIONS, "max_retries": 1})


def test_asynchronously(server: Server) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0) as plain:
            create = instructor.from_openai(plain).chat.completions
            made = await asyncio.gather(*(create.create(response_model=Place, **OPTIONS) for _ in range(3)))
            parts = [part async for part in create.create_partial(response_model=Place, **OPTIONS)]
            return [place.model_dump() for place in (*made, parts[-1])]

    places = asyncio.run(ask())
    assert places == [places[0]] * 4 and places[0]["city"] == "Rome"


def test_by_its_own_name(server: Server) -> None:
    client: Any = instructor.from_provider("openai/tiny", base_url=server.address + "/v1", api_key="none")
    made, answer = client.chat.completions.create_with_completion(
        messages=MESSAGES, response_model=Place, temperature=0, max_retries=0
    )
    assert made.city == "Rome" and answer.usage.completion_tokens > 4
