"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's protocol."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine.server import sse
from engine.server.blocks import Blocks
from engine.server.choices import collect, submit
from engine.server.disconnect import until_disconnect
from engine.server.errors import APIError
from engine.server.json import JSON, JSONRoute
from engine.server.messages_answer import DIALECT, MessageMaker
from engine.server.messages_input import conversation
from engine.server.messages_protocol import CountTokensBody, MessagesBody
from engine.server.request_id import engine_id, request_id
from engine.server.state import ServerState, state_of
from engine.server.turn import Conversation, count_tokens, prepare, render

router = APIRouter(route_class=JSONRoute)
State = Annotated[ServerState, Depends(state_of)]
_NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""The switches that chat templates have: Qwen's, and DeepSeek's."""


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request, state: State) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    model = state.check_model(body.model)
    params = body.sampling_params()
    turn = await prepare(state, await _said(body, state), params)
    identity = engine_id(request, "msg")
    streams = await submit(
        state,
        [turn.prompt],
        turn.params,
        identity,
        stream=body.stream,
        priority=body.priority,
        timeout=body.timeout,
        request=request,
    )
    maker = MessageMaker(identity, model, Blocks(turn.reader()), body.max_tokens)
    if body.stream:
        return sse.EventStream(maker.events(streams[0]), streams, request_id(request), DIALECT)
    (output,) = await until_disconnect(request, collect(streams))
    return JSON(maker.whole(output))


@router.post("/v1/messages/count_tokens")
async def count(body: CountTokensBody, state: State) -> Response:
    """How many tokens such a request's prompt has."""
    state.check_model(body.model)
    return JSON({"input_tokens": await count_tokens(state, await _said(body, state))})


async def _said(body: CountTokensBody, state: ServerState) -> Conversation:
    """What the body says; where it asks for no thoughts, with the template's switch for that."""
    said = conversation(body)
    if body.thinking is None or body.thinking.type == "adaptive" or state.engine.reasoning_parser is None:
        return said
    switched = dataclasses.replace(said, variables={**(said.variables or {}), **_NO_THOUGHTS})
    plain = dataclasses.replace(said, prefill="")
    if await render(state, plain) == await render(state, dataclasses.replace(switched, prefill="")):
        raise APIError(
            400,
            "thinking cannot be disabled: this model's chat template has no switch for it; leave it out",
            param="thinking",
            code="unsupported_parameter",
        )
    return switched
