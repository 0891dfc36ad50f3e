"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's protocol."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine_server import sse
from engine_server.blocks import Blocks
from engine_server.choices import collect, submit
from engine_server.disconnect import until_disconnect
from engine_server.json import JSON, JSONRoute
from engine_server.labels import note
from engine_server.messages_answer import DIALECT, MessageMaker
from engine_server.messages_input import conversation
from engine_server.messages_protocol import CountTokensBody, MessagesBody
from engine_server.request_id import engine_id, request_id
from engine_server.state import ServerState, state_of
from engine_server.thinking import with_budget, with_effort, without_thoughts
from engine_server.turn import Conversation, count_tokens, prepare

router = APIRouter(route_class=JSONRoute)
State = Annotated[ServerState, Depends(state_of)]


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request, state: State) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    model = state.check_model(body.model)
    note(request, None if body.metadata is None else body.metadata.user_id, cache_salt=body.cache_salt)
    params = body.sampling_params(state.engine.sampling_defaults)
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
    maker = MessageMaker(identity, model, Blocks(turn.reader()), params.max_tokens or body.max_tokens)
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
    """What the body says, with the template's switches for how much the model thinks."""
    said = conversation(body)
    if body.thinking is not None and body.thinking.type == "disabled":
        said = await without_thoughts(state, said, "thinking")
    elif body.thinking is not None and body.thinking.type == "enabled":
        said = with_budget(state, said, body.thinking.budget_tokens, "thinking.budget_tokens", switch=True)
    effort = None if body.output_config is None else body.output_config.effort
    return await with_effort(state, said, effort, "output_config.effort")
