"""The short way to a route answers as the framework's way does."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import orjson
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from pydantic import model_validator

from engine_server import errors, shortcut
from engine_server.body_model import Body
from engine_server.json import JSON, LARGE, JSONRoute
from engine_server.routes import chat, completions, messages, pooling, responses, tokenization
from engine_server.shortcut import Shortcut
from engine_server.state import ServerState, state_of


class Said(Body):
    """A body."""

    text: str
    times: int = 1

    @model_validator(mode="after")
    def _note_thread(self) -> "Said":
        READ_IN.append(threading.get_ident())
        return self


READ_IN: list[int] = []
"""The threads in which bodies were checked."""


router = APIRouter(route_class=JSONRoute)
State = Annotated[ServerState, Depends(state_of)]


@router.post("/say")
async def say(body: Said, request: Request, state: State) -> Response:
    if body.text == "refused":
        raise errors.APIError(418, "no tea", param="text", headers={"Retry-After": "7"})
    if body.text == "broken":
        raise RuntimeError("something of the server's own")
    return JSON({"said": body.text * body.times, "by": state.model_names[0], "path": request.url.path})


@router.post("/names")
async def names(body: Said, state: State) -> Response:
    return JSON([body.text, *state.model_names])


@router.post("/parts/{part}")
async def parts(part: str, body: Said, state: State) -> Response:
    return JSON({part: body.text})


def application() -> FastAPI:
    app = FastAPI()
    errors.install(app)
    app.include_router(router)
    app.state.server = SimpleNamespace(model_names=("tiny",))
    return app


async def post(app: Any, path: str, content: bytes, kind: str | None) -> tuple[int, bytes, dict[str, str]]:
    async def with_ids(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})["request_id"] = "r"
        await app(scope, receive, send)

    transport = httpx.ASGITransport(with_ids, raise_app_exceptions=False)
    headers = {} if kind is None else {"Content-Type": kind}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(path, content=content, headers=headers)
    return answer.status_code, answer.content, dict(answer.headers)


BODIES: Sequence[bytes] = (
    orjson.dumps({"text": "hi", "times": 2}),
    orjson.dumps({"text": "refused"}),
    orjson.dumps({"text": "broken"}),
    orjson.dumps({"text": "hi", "times": "2"}),
    orjson.dumps({"text": "hi", "time": 2}),
    orjson.dumps({}),
    b"",
    b"[1]",
    b'{"text": NaN}',
    b'{"text": "half',
    b"[" * 100_000,
)


@pytest.mark.parametrize("path", ["/say", "/names", "/parts/a", "/nowhere"])
async def test_both_ways_answer_alike(path: str) -> None:
    app = application()
    short = Shortcut(app, [router])
    for content in BODIES:
        for kind in ("application/json", "application/json; charset=utf-8", "text/plain", "application/jsonish", None):
            assert await post(short, path, content, kind) == await post(app, path, content, kind), (content[:40], kind)


async def test_a_well_formed_request_does_not_pass_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    app = application()
    short = Shortcut(app, [router])
    assert short.paths == {"/say", "/names"}

    async def nobody(*_: Any) -> None:
        raise AssertionError("the framework was asked")

    monkeypatch.setattr(app, "router", nobody)
    monkeypatch.setattr(app, "middleware_stack", nobody)
    status, content, _ = await post(short, "/say", BODIES[0], "application/json")
    assert (status, orjson.loads(content)) == (200, {"said": "hihi", "by": "tiny", "path": "/say"})


async def test_a_large_body_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is well-formed, and one that is not and goes the framework's way too: it is read once."""
    app = application()
    short = Shortcut(app, [router])
    parsed: list[int] = []

    def loads(content: bytes) -> Any:
        parsed.append(threading.get_ident())
        return orjson.loads(content)

    monkeypatch.setattr(shortcut, "orjson", SimpleNamespace(loads=loads, JSONDecodeError=orjson.JSONDecodeError))
    for fits, field in ((True, "text"), (False, "other")):
        for size, aside in ((10, False), (LARGE, True)):
            parsed.clear()
            READ_IN.clear()
            status, content, _ = await post(short, "/say", orjson.dumps({field: "a" * size}), "application/json")
            assert status == (200 if fits else 400), content[:100]
            assert len(parsed) == 1 and (parsed[0] != threading.get_ident()) == aside
            assert (parsed if fits else []) == READ_IN


def test_the_routes_that_generate_have_a_short_way() -> None:
    modules = (chat, completions, messages, responses, pooling, tokenization)
    paths = Shortcut(FastAPI(), [module.router for module in modules]).paths
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"}
