"""`/v1/responses`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response

from engine.embedding import RequestStream
from engine.types.params import SamplingParams
from engine_server.bodies import JSON, encoded
from engine_server.conversation.completion import Blocks
from engine_server.conversation.turn import prepare, with_effort
from engine_server.errors import APIError, invalid
from engine_server.middleware import engine_id, note, request_id
from engine_server.responses.answer import Deleted, InputItems, ResponseAnswer, ResponseMaker, tell_error
from engine_server.responses.input import Item, ResponsesBody, conversation, items_of
from engine_server.responses.store import EventLog, Owner, StoredResponse
from engine_server.state import ServerState, State, collect
from engine_server.stream import EventStream, until_disconnect

MAX_ITEMS = 100
"""The most items of one page."""


async def respond(body: ResponsesBody, request: Request, state: State) -> Response:
    """Answer a conversation, which may go on from a stored response."""
    model = state.admit(body.model)
    params = body.sampling_params(state.engine.sampling_defaults)
    note(request, body.user, body.safety_identifier, cache_salt=body.cache_salt)
    store = _store(body, state)
    encoded([body.tools, body.tool_choice, body.text and body.text.model_dump()])  # the response repeats them
    before = await _before(body, request, state)
    items = items_of(body)
    effort = None if body.reasoning is None else body.reasoning.effort
    said = with_effort(state, conversation(body, before, items), effort, "reasoning.effort")
    turn = await prepare(state, said, params)
    streams = await state.generate(request, body, [turn.prompt], turn.params, engine_id(request, "resp"))
    owner = _owner(request)
    head = _head(body, model, params, store)
    log = state.responses.log(head["id"]) if body.background and body.stream else None

    async def keep(response: dict[str, Any]) -> None:
        if store:
            await state.responses.put(owner, StoredResponse(response, before, items, log))

    def count(text: str) -> int:
        return len(state.engine.tokenizer.encode(text, add_special_tokens=False))

    maker = ResponseMaker(head, Blocks(turn.reader()), count, keep)
    name = request_id(request)
    if body.background:
        begun = await _run_behind(maker, streams, request, state, log)
        return _answer(begun) if log is None else EventStream(log.read(), (), name, tell_error)
    if body.stream:
        return EventStream(maker.events(streams[0]), streams, name, maker.tell_error)
    (output,) = await until_disconnect(request.receive, collect(streams))
    return _answer(await maker.whole(output))


async def _run_behind(
    maker: ResponseMaker, streams: list[RequestStream], request: Request, state: ServerState, log: EventLog | None
) -> dict[str, Any]:
    """Compute the response whether or not somebody waits; it is kept as it stands, from now on, its events in `log`."""

    async def run() -> None:
        try:
            if log is not None:
                async for event in maker.events(streams[0]):
                    log.add(event)
                return
            (output,) = await collect(streams)
            await maker.whole(output)
        except Exception as error:
            _, response = maker.failed(error, request_id(request))
            await maker.keep(response)
            if log is not None:
                log.add(maker.failure(response))
        except asyncio.CancelledError:
            await maker.keep(maker.response("cancelled"))

    def close() -> None:
        for stream in streams:
            stream.close()
        if log is not None:
            log.end()

    begun = maker.response("in_progress")
    await maker.keep(begun)
    state.background.start(begun["id"], run(), request.scope["state"].get("key_usage"), close)
    return begun


async def retrieve(
    identity: str,
    request: Request,
    state: State,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=0)] | None = None,
) -> Response:
    """A stored response; with `stream` its events, behind the one with the number `starting_after`."""
    _check_query(request, "stream", "starting_after")
    stored = await _stored(identity, request, state)
    if not stream:
        if starting_after is not None:
            raise APIError(400, "starting_after is only allowed with stream=true", param="starting_after")
        return _answer(stored.response)
    if stored.events is None:
        found = "the events of this response are not kept: they are with background=true and stream=true"
        raise APIError(400, found, param="stream")
    start = 0 if starting_after is None else starting_after + 1
    return EventStream(stored.events.read(start), (), request_id(request), tell_error)


async def delete(identity: str, request: Request, state: State) -> Response:
    """Forget a stored response; where it is being computed, that ends."""
    await _stored(identity, request, state)
    await state.background.cancel(identity)
    await state.responses.delete(_owner(request), identity)
    return JSON(Deleted(id=identity, object="response", deleted=True))


async def cancel(identity: str, request: Request, state: State) -> Response:
    """Stop computing a response in the background. One that was cancelled already stays so."""
    stored = await _stored(identity, request, state)
    if not stored.response["background"]:
        raise APIError(400, "only a response in the background can be cancelled, and this one is none")
    await state.background.cancel(identity)
    return _answer((await _stored(identity, request, state)).response)


async def input_items(
    identity: str,
    request: Request,
    state: State,
    order: Literal["asc", "desc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
    after: str | None = None,
) -> Response:
    """What a stored response answers, page by page."""
    _check_query(request, "order", "limit", "after")
    stored = await _stored(identity, request, state)
    items = [_named(identity, i, item) for i, item in enumerate((*stored.before, *stored.items))]
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise APIError(400, f"after: there is no item {after[:200]!r}; send the last id of a page", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return JSON(InputItems(object="list", data=page, has_more=len(items) > limit, first_id=first, last_id=last))


def _answer(response: Mapping[str, Any]) -> JSON:
    return JSON(ResponseAnswer.model_validate(response))


def _owner(request: Request) -> Owner:
    """Whose responses these are: the API key's, by its digest."""
    salt: Owner = request.scope["state"].get("cache_salt")
    return salt


def _store(body: ResponsesBody, state: ServerState) -> bool:
    if body.background and body.store is False:
        found = "background: a response that is not stored could not be got; send store=true"
        raise APIError(400, found, param="store")
    if body.store and not state.responses.max_bytes:
        raise invalid("store", "this server keeps no responses (--response-store-size 0); send false")
    return bool(state.responses.max_bytes) if body.store is None else body.store


async def _before(body: ResponsesBody, request: Request, state: ServerState) -> list[Item]:
    name = body.previous_response_id
    if name is None:
        return []
    stored = await state.responses.get(_owner(request), name)
    if stored is None:
        found = f"the response {name[:200]!r} is not here, or not any more; send the whole conversation as input"
        raise APIError(400, found, param="previous_response_id", code="previous_response_not_found")
    if stored.response["status"] not in ("completed", "incomplete"):
        found = f"the response {name[:200]!r} is {stored.response['status']}"
        raise APIError(400, f"{found}; go on from one that has come to its end", param="previous_response_id")
    return stored.conversation


async def _stored(identity: str, request: Request, state: ServerState) -> StoredResponse:
    stored = await state.responses.get(_owner(request), identity)
    if stored is None:
        found = f"the response {identity[:200]!r} is not here, or not any more"
        raise APIError(404, found, code="response_not_found")
    return stored


def _check_query(request: Request, *known: str) -> None:
    """Raise a 400 APIError for a parameter that is none of these."""
    for name in (name[:64] for name in request.query_params if name not in known):
        raise APIError(400, f"the parameter {name!r} is not supported here", param=name, code="unsupported_parameter")


def _named(identity: str, i: int, item: Item) -> dict[str, Any]:
    """An item with its type and an id: the client's own, or one of its place."""
    return {"type": "message", **item, "id": item.get("id") or f"item_{identity.removeprefix('resp_')}_{i}"}


def _head(body: ResponsesBody, model: str, params: SamplingParams, store: bool) -> dict[str, Any]:
    """A response before it is computed, but for its status."""
    form = {"type": "text"} if body.text is None or body.text.format is None else body.text.format.dumped()
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": body.background is True,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": store,
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
