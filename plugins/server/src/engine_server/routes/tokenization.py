"""`/tokenize` and `/detokenize`: a prompt as the model gets it, and the way back. Nothing is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from engine.embedding import LONG
from engine_server.errors import APIError
from engine_server.json import JSON, JSONRoute
from engine_server.rendering import rendered
from engine_server.state import ServerState, state_of
from engine_server.tokenization_protocol import DetokenizeBody, TokenizeBody
from engine_server.tool_request import tool_request

router = APIRouter(route_class=JSONRoute)
State = Annotated[ServerState, Depends(state_of)]
T = TypeVar("T")


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, state: State) -> Response:
    """The ids of a text, or of a conversation as the chat template renders it."""
    state.check_model(body.model)
    text, special = body.prompt, True
    if text is None:
        text, special = await _rendered(body, state), False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    engine = state.engine
    tokens = await engine.tokenize(text, special) if text else []
    strings = None
    if body.return_token_strs:
        strings = await _aside(lambda: [engine.tokenizer.token(token) for token in tokens], tokens)
    answer = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": strings}
    return JSON(answer)


@router.post("/detokenize")
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

    return JSON({"prompt": await _aside(text, body.tokens)})


async def _aside(work: Callable[[], T], tokens: Sequence[int]) -> T:
    """The answer of `work` on these; of many in a thread."""
    return work() if len(tokens) < LONG else await asyncio.to_thread(work)


async def _rendered(body: TokenizeBody, state: ServerState) -> str:
    prompt = await rendered(
        state,
        body.messages or (),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
        tools=tool_request(body.tools, None, None),
    )
    return prompt["prompt"]
