"""JSON, read and written by orjson, and what all bodies of requests and answers have in common: they are pydantic
models, from which FastAPI makes its document. What is not named in a body's model is refused by name, never ignored."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
import orjson
from fastapi import Request
from fastapi.routing import APIRoute
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

from engine.embedding import Prompt
from engine.plugin.hints import did_you_mean

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
        return dumps(content)


_PIECE = 2**20


class Count(NamedTuple):
    """What a text of JSON makes when it is read.

    Args:
        objects: lists, objects and strings, names of fields among them.
        values: whatever lists and objects hold, and these themselves: at most one less than there are.
    """

    objects: int
    values: int


def count(content: bytes) -> Count:
    """What reading this would make, without making it: for what is no JSON, up to where that shows, at least as much.

    Reading keeps the interpreter until it is done, numpy does not.
    """
    opened = num_quotes = commas = 0
    inside, rest = 0, b""  # whether a string goes on, and a backslash that has lost its character
    for start in range(0, len(content), _PIECE):
        piece = (rest + content[start : start + _PIECE]).replace(rb"\\", b"")
        rest = piece[-1:] if piece.endswith(b"\\") else b""
        piece = piece.removesuffix(rest).replace(rb"\"", b"")
        bytes_ = np.frombuffer(piece, np.uint8)
        quotes = (bytes_ == ord('"')).view(np.uint8)
        outside = np.bitwise_xor.accumulate(quotes, dtype=np.uint8) == inside
        opened += int(np.count_nonzero(outside & ((bytes_ == ord("[")) | (bytes_ == ord("{")))))
        commas += int(np.count_nonzero(outside & (bytes_ == ord(","))))
        num_quotes += int(np.count_nonzero(quotes))
        inside = num_quotes & 1
    return Count(opened + num_quotes // 2, opened + commas)


MOST = Count(objects=2**15, values=2**19)
"""What a body of JSON may hold. Reading and checking so much keeps the interpreter for some 50 ms at a time."""


class JSONRequest(Request):
    """A request whose JSON is read strictly, and once, by whoever asks first; what is large, in a thread."""

    async def json(self) -> Any:
        """The body's data. Raises json.JSONDecodeError."""
        if _DATA not in self.scope:
            await read_json(self.scope, await self.body())
        return self.scope[_DATA]


class JSONRoute(APIRoute):
    """A route whose body is read by `JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        resolve = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await resolve(JSONRequest(request.scope, request.receive))

        return handle


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


def prompts_of(inputs: list[str | list[int]], special: bool | None, most: int | None) -> list[Prompt]:
    """The same as the engine takes them: texts with special tokens around them unless `special` is False, and each cut
    to `most` tokens where that is a number."""
    cut: dict[str, Any] = {} if most is None else {"truncate_prompt_tokens": most}
    prompts: list[Any] = [
        {"prompt": one, "add_special_tokens": special is not False, **cut}
        if isinstance(one, str)
        else {"prompt_token_ids": one, **cut}
        for one in inputs
    ]
    return prompts


def check_special_tokens(special: bool | None, inputs: list[str | list[int]]) -> None:
    """Raise ValueError where `add_special_tokens` is said of token ids."""
    if special is not None and not all(isinstance(one, str) for one in inputs):
        raise ValueError("add_special_tokens is for texts; token ids are taken as they are")


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


class ConversationBody(Body):
    """What a body says that takes a conversation in place of something else.

    Args:
        messages: the conversation, rendered by the model's chat template.
        add_special_tokens: put those around it that the tokenizer puts there; without it, true for a text and false for
            a conversation, whose template has written them.
        add_generation_prompt: end the prompt where the assistant begins.
        continue_final_message: the last message, the assistant's, is the beginning of the answer.
        chat_template_kwargs: further variables for the template.
    """

    messages: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_place(self, place: str, *more: str) -> None:
        """Raise ValueError for a conversation beside what the field `place` holds, for none of the two, and for fields
        that say something of a conversation where there is none; `more` are such, too."""
        if (getattr(self, place) is None) == (self.messages is None):
            raise ValueError(f"send {place} or messages, one of them")
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", *more):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for messages; leave it out")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other; send one of them")


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


class KVRetentionBody(Body):
    """What becomes of a request's KV cache when it has ended: see `engine.types.retention.KVRetention`.

    Args:
        ttl: seconds for which its pages are kept before others.
        priority: 0 to 100; pages of a lower one are given up first.
        pin: after those of any priority.
        release: nothing is kept, nor any more what earlier requests kept that this one goes on from.
        session: what earlier requests of this name kept, and this one does not, is released.
    """

    ttl: float | None = None
    priority: int | None = None
    pin: bool | None = None
    release: bool | None = None
    session: str | None = None


class GeneratingBody(QueuedBody):
    """What every body says of a request that generates. Ranges are checked by the engine.

    Args:
        kv_retention: what becomes of its KV cache.
        kv_transfer_params: for the KV connector: which engine computed the prompt, or is to go on from it. What an
            answer of the one has under this name is for the other. Nothing happens where no connector is at work.
    """

    stream: bool = False
    kv_retention: KVRetentionBody | None = None
    kv_transfer_params: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Answer(BaseModel):
    """What a route answers, or a part of it. A field that is not set is left out; one that is set to None is null."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CachedTokens(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(Answer):
    """Tokens over all prompts and completions of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
