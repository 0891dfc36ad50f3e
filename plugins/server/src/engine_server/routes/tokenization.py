"""`/tokenize` and `/detokenize`: a prompt as the model gets it, and the way back. Nothing is computed."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from engine.frontend.async_llm import LONG_PROMPT
from engine_server.errors import APIError
from engine_server.json import JSON, JSONRoute
from engine_server.rendering import rendered
from engine_server.state import ServerState, state_of
from engine_server.tokenization_protocol import DetokenizeBody, TokenizeBody
from engine_server.tool_request import tool_request

router = APIRouter(route_class=JSONRoute)
State = Annotated[ServerState, Depends(state_of)]


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
    strings = [engine.tokenizer.token(token) for token in tokens] if body.return_token_strs else None
    answer = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": strings}
    return JSON(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, state: State) -> Response:
    """The text of ids, special tokens included."""
    state.check_model(body.model)
    tokenizer = state.engine.tokenizer
    outside = next((token for token in body.tokens if not 0 <= token < tokenizer.vocab_size), None)
    if outside is not None:
        found = f"tokens: the id {outside} is none of this tokenizer's; they end at {tokenizer.vocab_size - 1}"
        raise APIError(400, found, param="tokens")
    if len(body.tokens) < LONG_PROMPT:
        return JSON({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})
    return JSON({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)})


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
