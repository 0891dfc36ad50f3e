"""A route that gets its body, the request and the state without FastAPI's resolution answers as others do; and families
of routes come in, go out, and are replaced as any plugin's."""

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from pydantic import model_validator
from starlette.types import ASGIApp

from engine.plugin import HookRelay, Registry, hookimpl
from engine.plugin.candidate import Candidate
from engine.plugin.plugin_list import PluginList
from engine_server import bodies, errors
from engine_server.bodies import JSON, LARGE, Body, Count, JSONRoute
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase
from engine_server.middleware import Dispatch, Entry
from engine_server.plugins import ServerView, add_routes
from engine_server.state import State


class Said(Body):
    """A body."""

    text: str
    times: int = 1

    @model_validator(mode="after")
    def _note_thread(self) -> "Said":
        CHECKED.append(self.text[:5])
        if self.text == "unforeseen":
            raise LookupError("a check of a model's own")
        return self


CHECKED: list[str] = []
"""The bodies that were checked."""


async def say(body: Said, request: Request, state: State) -> Response:
    if body.text == "refused":
        raise errors.APIError(418, "no tea", param="text", headers={"Retry-After": "7"})
    if body.text == "broken":
        raise RuntimeError("something of the server's own")
    return JSON({"said": body.text * body.times, "by": state.model_names[0], "path": request.url.path})


async def names(body: Said, state: State) -> Response:
    return JSON([body.text, *state.model_names])


async def parts(part: str, body: Said, state: State) -> Response:
    return JSON({part: body.text})


async def plain(body: Said) -> dict[str, str]:
    return {"said": body.text}


def in_a_thread(body: Said) -> Response:
    return JSON(body.text)


async def of_a_query(body: Said, request: str) -> Response:
    return JSON([body.text, request])


async def of_a_dependency(body: Said = Depends(lambda: Said(text="another's"))) -> Response:  # noqa: B008
    return JSON(body.text)


async def of_an_unknown_type(body: Said) -> "OnlyForTypeCheckers":  # type: ignore[name-defined]  # noqa: F821
    return JSON(body.text)


def application() -> FastAPI:
    app = FastAPI()
    errors.install(app)
    router = APIRouter(route_class=JSONRoute)
    router.post("/say")(say)
    router.post("/names")(names)
    router.post("/parts/{part}")(parts)
    router.post("/plain")(plain)
    router.post("/thread")(in_a_thread)
    router.post("/query")(of_a_query)
    router.post("/dependency")(of_a_dependency)
    router.post("/unknown", response_model=None)(of_an_unknown_type)
    router.post("/partial")(functools.partial(say))
    app.router.routes += router.routes
    app.state.server = SimpleNamespace(model_names=("tiny",))
    return app


def dispatch(app: FastAPI) -> Dispatch:
    lifecycle = Lifecycle()
    lifecycle.phase = Phase.SERVING
    return Dispatch(app, lifecycle=lifecycle, shutdown_timeout=1)


def straight(app: FastAPI) -> ASGIApp:
    """The way around the framework."""
    direct = dispatch(app)
    assert set(direct._functions) == {"/say", "/names"}
    return Entry(direct, Counter(), max_body=10**6, timeout=5, most=Count(10**9, 10**9))


async def post(app: Any, path: str, content: bytes, kind: str | None) -> tuple[int, bytes, dict[str, str]]:
    async def with_ids(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})["request_id"] = "r"
        await app(scope, receive, send)

    transport = httpx.ASGITransport(with_ids, raise_app_exceptions=False)
    headers = {} if kind is None else {"Content-Type": kind}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(path, content=content, headers=headers)
    headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
    return answer.status_code, answer.content, headers


BODIES: Sequence[bytes] = (
    orjson.dumps({"text": "hi", "times": 2}),
    orjson.dumps({"text": "refused"}),
    orjson.dumps({"text": "broken"}),
    orjson.dumps({"text": "unforeseen"}),
    orjson.dumps({"text": "hi", "times": "2"}),
    orjson.dumps({"text": "hi", "time": 2}),
    orjson.dumps({}),
    b"",
    b"[1]",
    b'{"text": NaN}',
    b'{"text": "half',
    b"[" * 100_000,
)


PATHS = ("say", "names", "parts/a", "plain", "thread", "query?request=a", "dependency", "unknown", "partial", "nowhere")


@pytest.mark.parametrize("path", PATHS)
async def test_both_ways_answer_alike(path: str) -> None:
    resolved = application()
    app = straight(resolved)
    for content in BODIES:
        for kind in ("application/json", "application/json; charset=utf-8", "text/plain", "application/jsonish", None):
            assert await post(app, f"/{path}", content, kind) == await post(resolved, f"/{path}", content, kind), (
                content[:40],
                kind,
            )


async def test_a_large_body_is_read_in_a_thread_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = straight(application())
    read_in: list[int] = []

    def loads(content: bytes) -> Any:
        read_in.append(threading.get_ident())
        return orjson.loads(content)

    monkeypatch.setattr(bodies, "loads", loads)
    for fits, field in ((True, "text"), (False, "other")):
        for size, aside in ((10, False), (LARGE, True)):
            read_in.clear()
            CHECKED.clear()
            status, content, _ = await post(app, "/say", orjson.dumps({field: "a" * size}), "application/json")
            assert status == (200 if fits else 400), content[:100]
            assert len(read_in) == 1 and (read_in[0] != threading.get_ident()) == aside
            assert (["aaaaa"] if fits else []) == CHECKED


async def sent(app: ASGIApp, method: str, path: str, state: dict[str, Any]) -> tuple[int, bytes]:
    """The answer to a request whose body does not come to its end."""
    answer: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        answer.append(message)

    headers = [(b"content-length", b"1000000"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    async with asyncio.timeout(5):
        await app({**scope, "state": {"request_id": "r", **state}}, receive, send)
    return answer[0]["status"], b"".join(message.get("body", b"") for message in answer[1:])


async def test_where_no_key_is_needed_no_body_is_read() -> None:
    app = application()
    app.get("/metrics")(lambda: "all")
    app.post("/ping")(lambda: "well")
    for method, path, status in (("POST", "/ping", 200), ("POST", "/metrics", 405), ("PUT", "/health", 404)):
        assert (await sent(straight(app), method, path, {}))[0] == status


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_lies_below_admin_is_closed_whosever_it_is(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Also where what asks for keys is left out, and what takes its place thinks of clients alone."""
    monkeypatch.setattr(errors, "LINGER_SECONDS", 0.01)
    app = application()
    app.api_route("/admin/mine", methods=["GET", "POST"])(lambda: "mine")
    app.api_route("/{first}/yours", methods=["GET", "POST"])(lambda first: first)
    for path in ("/admin", "/admin/mine", "/admin/yours", "/admin/nowhere"):
        for state in ({}, {"administers": False}, {"administers": 1}, {"api_key": "a"}):
            status, body = await sent(straight(app), method, path, state)
            assert status == 403 and b"admin_key_required" in body
    if method == "GET":
        assert (await sent(straight(app), method, "/admin/mine", {"administers": True}))[0] == 200


# -- families ----------------------------------------------------------------------------------------------------------
FAMILIES = {
    "openai_routes": "/v1/chat/completions",
    "anthropic_routes": "/v1/messages",
    "responses_routes": "/v1/responses",
    "pooling_routes": "/v1/embeddings",
    "adapter_routes": "/v1/load_lora_adapter",
    "tokenization_routes": "/tokenize",
    "operations_routes": "/health",
    "metrics_routes": "/metrics",
}


def idle_server(hooks: HookRelay) -> ServerView:
    """A server whose engine has done nothing yet."""
    llm: Any = SimpleNamespace(hooks=hooks, max_model_len=64, model_name="tiny", observe=lambda measures: None)
    return ServerView(llm, Counter(), KeyRing())


def served(plugins: str = "", extra: Sequence[Candidate] = ()) -> tuple[dict[str, Any], Registry]:
    """The endpoints by path where so many plugins are allowed."""
    registry = Registry.discover(extra, PluginList(plugins))
    app = FastAPI()
    hooks = HookRelay("frontend", registry)
    add_routes(app, hooks, idle_server(hooks))
    return {route.path: getattr(route, "endpoint", None) for route in app.routes}, registry  # type: ignore[attr-defined]


def test_every_family_is_a_plugin_that_can_be_left_out() -> None:
    all_, registry = served()
    assert set(FAMILIES.values()) <= all_.keys() and not registry.quarantine
    for name, path in FAMILIES.items():
        left, _ = served(f"-hooks:{name}")
        assert path not in left and set(FAMILIES.values()) - {path} <= left.keys()


class Messages:
    """A stranger's, who pushes to the front."""

    @hookimpl(tryfirst=True)
    def http_routes(self, router: Any) -> None:
        router.post("/v1/messages")(names)


def test_a_stranger_takes_a_familys_place_where_it_is_left_out_and_only_there() -> None:
    stranger = Candidate("hooks.frontend", "zeta", 0, "zeta-messages", "1.0", f"{__name__}:Messages")
    kept, registry = served(extra=[stranger])
    assert kept["/v1/messages"] is not names and list(registry.quarantine) == [stranger]
    replaced, registry = served("-hooks:anthropic_routes", [stranger])
    assert replaced["/v1/messages"] is names and not registry.quarantine


def test_the_routes_that_generate_are_asked_without_fastapis_resolution() -> None:
    app, hooks = FastAPI(), HookRelay("frontend", Registry.discover())
    add_routes(app, hooks, idle_server(hooks))
    families = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"}
    assert set(dispatch(app)._functions) >= families
