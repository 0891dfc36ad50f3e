"""`/tokenize` and `/detokenize`: a prompt as the model gets it, and the way back. Nothing is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fastapi.responses import Response
from pydantic import model_validator

from engine_kit.long_prompts import LONG
from engine_server.bodies import JSON, Answer, Body, ConversationBody, Integers, Objects
from engine_server.conversation.tools import tool_request
from engine_server.conversation.turn import render, said
from engine_server.errors import APIError
from engine_server.state import State

T = TypeVar("T")


class TokenizeBody(ConversationBody):
    """`POST /tokenize`: of a text, or of a conversation.

    Args:
        model: one of the served names.
        prompt: a text.
        return_token_strs: answer with the text of each token too.
        tools: functions that the template shows to the model, in OpenAI's form.
    """

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool = False
    tools: Objects | None = None

    @model_validator(mode="after")
    def _text_or_conversation(self) -> TokenizeBody:
        self.check_place("prompt", "tools")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`.

    Args:
        model: one of the served names.
        tokens: token ids.
    """

    model: str | None = None
    tokens: Integers


class Tokens(Answer):
    """`POST /tokenize`; the texts of the tokens where they are asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    """`POST /detokenize`."""

    prompt: str


async def tokenize(body: TokenizeBody, state: State) -> Response:
    """The ids of a text, or of a conversation as the chat template renders it."""
    state.check_model(body.model)
    text, special = body.prompt, True
    if text is None:
        tools = tool_request(body.tools, None, None)
        conversation = said(body, add_generation_prompt=body.add_generation_prompt is not False, tools=tools)
        text, special = (await render(state, conversation))["prompt"], False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    engine, adapter = state.engine, state.adapters.get(body.model)
    tokens = await engine.long.run(partial(engine.inputs.tokenize, text, special, adapter), len(text)) if text else []
    strings = None
    if body.return_token_strs:
        tokenizer = engine.inputs.tokenizer_of(adapter)
        strings = await _aside(lambda: [tokenizer.token(token) for token in tokens], tokens)
    most = engine.max_model_len
    return JSON(Tokens.model_construct(count=len(tokens), max_model_len=most, tokens=tokens, token_strs=strings))


async def detokenize(body: DetokenizeBody, state: State) -> Response:
    """The text of ids, special tokens included."""
    state.check_model(body.model)
    tokenizer = state.engine.inputs.tokenizer_of(state.adapters.get(body.model))

    def text() -> str:
        if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < tokenizer.vocab_size):
            outside = next(token for token in body.tokens if not 0 <= token < tokenizer.vocab_size)
            found = f"tokens: the id {outside} is none of this tokenizer's; they end at {tokenizer.vocab_size - 1}"
            raise APIError(400, found, param="tokens")
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    return JSON(Text(prompt=await _aside(text, body.tokens)))


async def _aside(work: Callable[[], T], tokens: Sequence[int]) -> T:
    """The answer of `work` on these; of many in a thread."""
    return work() if len(tokens) < LONG else await asyncio.to_thread(work)
