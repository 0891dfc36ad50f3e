"""JSON, read and written by orjson, and what all bodies of requests and answers have in common: they are pydantic
models, from which FastAPI makes its document. What is not named in a body's model is refused by name, never ignored."""

from __future__ import annotations

import asyncio
import functools
from typing import Annotated, Any, Literal, cast

import orjson
from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    Strict,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import TypeAliasType

from engine.plugin.hints import did_you_mean
from engine.types.params import SamplingDefaults, SamplingParams

LARGE = 64 * 1024
"""Bytes of a body from which it is looked through and read in a thread: below, that takes two milliseconds at most."""


def dumps(content: Any) -> bytes:
    """Plain data and `Answer`s as JSON."""
    return orjson.dumps(content, default=_set_fields)


def _set_fields(answer: BaseModel) -> dict[str, Any]:
    set_ = answer.model_fields_set
    return {name: value for name, value in vars(answer).items() if name in set_}


def loads(content: bytes) -> Any:
    """The data of a text of JSON. Raises json.JSONDecodeError, with a hint where that helps."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        if b"NaN" in content or b"Infinity" in content:
            error.msg += " (NaN and Infinity are no JSON; send finite numbers)"
        error.doc = ""  # the whole body, which nobody reads
        raise


def encoded(content: Any) -> bytes:
    """What a client sent, as JSON again.

    Raises RecursionError, which is answered with a 400, where it is nested so deep that it can be read but not written.
    """
    try:
        return orjson.dumps(content)
    except orjson.JSONEncodeError as error:
        raise RecursionError(str(error)) from error


class JSON(Response):
    """A body of plain data, or an `Answer`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return dumps(content)


class JSONRequest(Request):
    """A request whose JSON is read strictly, and once, by whoever asks first; what is large, in a thread."""

    async def json(self) -> Any:
        """The body's data. Raises json.JSONDecodeError."""
        if _DATA not in self.scope:
            await read_json(self.scope, await self.body())
        return self.scope[_DATA]


async def read_json(scope: Scope, content: bytes) -> Any:
    """The data of a request's body, for each `JSONRequest` of it too. Raises json.JSONDecodeError."""
    data = scope[_DATA] = loads(content) if len(content) < LARGE else await asyncio.to_thread(loads, content)
    return data


_DATA = "engine.json"
MAX_METADATA = 16
"""The most pairs."""

# A list with a million wrong entries is refused for the first of them: pydantic would describe each.
# (Named types, because a FailFast cannot stand in a union: it has no hash. They do not inherit a model's strictness.)
Integers = TypeAliasType("Integers", Annotated[list[Annotated[int, Strict()]], FailFast()])
Strings = TypeAliasType("Strings", Annotated[list[str], FailFast()])
Objects = TypeAliasType("Objects", Annotated[list[dict[str, Any]], FailFast()])
IntegerLists = TypeAliasType("IntegerLists", Annotated[list[Integers], FailFast()])
Inputs = Annotated[str | Integers | Strings | IntegerLists, Field(union_mode="left_to_right")]
"""A text, token ids, or a list of either."""

Salt = Annotated[str, Field(min_length=1)]
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model may be asked to think: OpenAI's words, and one of Anthropic's."""


def _not_zero(count: int) -> int:
    if not count:
        raise ValueError("send a number of tokens from 1, or -1 for as many as fit")
    return count


Truncation = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]


def several(inputs: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """One entry for each of `Inputs`."""
    if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
        return [inputs]
    return cast("list[str | list[int]]", inputs)


@functools.cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class Body(BaseModel):
    """Strict types, no unknown keys. A key whose value is null counts as absent, as OpenAI's server has it."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known_and_set(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = _names(cls)
        for name in data:
            if name not in known:
                shown = str(name)[:64]
                hint = did_you_mean(shown, known) or "leave it out"
                message = "the parameter '{name}' is not supported by this server; {hint}"
                raise PydanticCustomError("unsupported_parameter", message, {"name": shown, "hint": hint})
        return {key: value for key, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Null is fine wherever nothing is."""
        made = handler(core_schema)
        schema = handler.resolve_ref_schema(made)
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                kept = {key: field.pop(key) for key in ("title", "default", "description") if key in field}
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **kept}
        return made


class QueuedBody(Body):
    """What every body says of a request that the engine computes.

    Args:
        model: one of the served names.
        cache_salt: prompts with another find none of each other's cached pages.
        priority: lower values are more urgent; other than 0 only where the scheduling policy heeds it.
        timeout: seconds until the request ends with a 504, waiting included.
    """

    model: str | None = None
    cache_salt: Salt | None = None
    priority: int = 0
    timeout: float | None = None


class GeneratingBody(QueuedBody):
    """What every body says of a request that generates. Ranges are checked by the engine."""

    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


_SAMPLING = frozenset(SamplingParams.__struct_fields__) - {"max_tokens", "logprobs", "structured_outputs"}


def sampling_params(
    body: GeneratingBody, defaults: SamplingDefaults, max_tokens: int | None, **more: Any
) -> SamplingParams:
    """The parameters that a body sets, by their own names, and `more`, over the model's. The engine verifies them."""
    given = {name: getattr(body, name) for name in body.model_fields_set & _SAMPLING}
    return SamplingParams(**defaults.under({**given, **more}, max_tokens))


class Answer(BaseModel):
    """What a route answers, or a part of it. A field that is not set is left out; one that is set to None is null."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
