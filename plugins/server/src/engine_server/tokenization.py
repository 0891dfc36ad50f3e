"""`/tokenize` and `/detokenize`: a prompt as the model gets it, and the way back. Nothing is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi.responses import Response
from pydantic import model_validator

from engine.embedding import LONG
from engine_server.bodies import JSON, Answer, Body, Integers, Objects
from engine_server.conversation.tools import tool_request
from engine_server.conversation.turn import Conversation, render, said
from engine_server.errors import APIError
from engine_server.plugins import State

T = TypeVar("T")


class TokenizeBody(Body):
    """`POST /tokenize`: of a text, or of a conversation.

    Args:
        model: one of the served names.
        prompt: a text.
        messages: a conversation, rendered by the model's chat template.
        add_special_tokens: put those around it that the tokenizer puts there; without it, true for a text and false for
            a conversation, whose template has written them.
        return_token_strs: answer with the text of each token too.
        add_generation_prompt: end the prompt where the assistant begins.
        continue_final_message: the last message, the assistant's, is the beginning of the answer.
        chat_template_kwargs: further variables for the template.
        tools: functions that the template shows to the model, in OpenAI's form.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None

    @model_validator(mode="after")
    def _text_or_conversation(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send prompt or messages, one of them")
        if self.prompt is not None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for messages; leave it out")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other; send one of them")
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
        text, special = (await render(state, _said(body)))["prompt"], False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    engine = state.engine
    tokens = await engine.tokenize(text, special) if text else []
    strings = None
    if body.return_token_strs:
        strings = await _aside(lambda: [engine.tokenizer.token(token) for token in tokens], tokens)
    most = engine.max_model_len
    return JSON(Tokens.model_construct(count=len(tokens), max_model_len=most, tokens=tokens, token_strs=strings))


async def detokenize(body: DetokenizeBody, state: State) -> Response:
    """The text of ids, special tokens included."""
    state.check_model(body.model)
    tokenizer = state.engine.tokenizer

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


def _said(body: TokenizeBody) -> Conversation:
    return said(
        body.messages or (),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
        tools=tool_request(body.tools, None, None),
    )
