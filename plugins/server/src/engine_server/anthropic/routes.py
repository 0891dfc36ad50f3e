"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's protocol."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from engine_server import stream
from engine_server.anthropic.answer import DIALECT, MessageMaker, TokenCount
from engine_server.anthropic.bodies import CountTokensBody, MessagesBody
from engine_server.anthropic.input import conversation
from engine_server.conversation.completion import Blocks
from engine_server.conversation.thinking import with_budget, with_effort, without_thoughts
from engine_server.conversation.turn import Conversation, count_tokens, prepare
from engine_server.json import JSON
from engine_server.request_id import engine_id, note, request_id
from engine_server.routes import State
from engine_server.state import ServerState
from engine_server.submission import collect, generate


async def messages(body: MessagesBody, request: Request, state: State) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    model = state.check_model(body.model)
    note(request, None if body.metadata is None else body.metadata.user_id, cache_salt=body.cache_salt)
    params = body.sampling_params(state.engine.sampling_defaults)
    turn = await prepare(state, _said(body, state), params)
    identity = engine_id(request, "msg")
    streams = await generate(state, request, body, [turn.prompt], turn.params, identity)
    maker = MessageMaker(identity, model, Blocks(turn.reader()), params.max_tokens or body.max_tokens)
    if body.stream:
        return stream.EventStream(maker.events(streams[0]), streams, request_id(request), DIALECT)
    (output,) = await stream.until_disconnect(request, collect(streams))
    return JSON(maker.whole(output))


async def count(body: CountTokensBody, state: State) -> Response:
    """How many tokens such a request's prompt has."""
    state.check_model(body.model)
    return JSON(TokenCount(input_tokens=await count_tokens(state, _said(body, state))))


def _said(body: CountTokensBody, state: ServerState) -> Conversation:
    """What the body says, with the template's switches for how much the model thinks."""
    said = conversation(body)
    if body.thinking is not None and body.thinking.type == "disabled":
        said = without_thoughts(state, said, "thinking")
    elif body.thinking is not None and body.thinking.type == "enabled":
        said = with_budget(state, said, body.thinking.budget_tokens, "thinking.budget_tokens", switch=True)
    effort = None if body.output_config is None else body.output_config.effort
    return with_effort(state, said, effort, "output_config.effort")
