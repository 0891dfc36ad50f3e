"""What hook plugins add to a server, and that what is broken in them costs nobody else anything."""

from __future__ import annotations

import asyncio
import collections
import contextlib

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import Counter, generate_latest

from engine.plugin import HookRelay, Registry, hookimpl
from engine.plugin.candidate import Candidate
from engine.plugin.plugin_list import PluginList
from engine.types.errors import ConfigError, RequestRefusedError
from engine_server import errors
from engine_server.keys import KeyRing
from engine_server.metrics.exposition import PluginMetrics
from engine_server.metrics.gathering import Families
from engine_server.middleware import Entry, Keys
from engine_server.plugins import ServerView, add_routes, without_key, wrap
from engine_server.state import origin


class Good:
    @hookimpl
    def http_routes(self, router):
        @router.get("/mine")
        async def mine():
            return "mine"

    @hookimpl
    def metrics(self, registry):
        Counter("good_things", "Good.", registry=registry)

    @hookimpl
    def http_middleware(self, app):
        async def layer(scope, receive, send):
            if scope["type"] == "http" and scope["path"] == "/late":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                raise LookupError("too late to say so")
            if scope["type"] == "http" and scope["path"] == "/no":
                raise RequestRefusedError("no", status=451, retry_after=1.2)
            await app(scope, receive, send)

        return layer


class Page:
    @hookimpl
    def http_routes(self, router, server):
        @router.get("/page")
        @without_key
        def page():
            return "page"

        @router.get("/behind")
        async def behind():
            return [len(pages.holders) for pages in await server.page_maps()]


class OpensTooMuch:
    @hookimpl
    def http_routes(self, router):
        @router.post("/post")
        @without_key
        def post():
            return "never"


class OpensAFolder:
    @hookimpl
    def http_routes(self, router):
        @router.get("/files/{name}")
        @without_key
        def files(name: str):
            return "never"


class TakesARoute:
    @hookimpl
    def http_routes(self, router):
        @router.get("/another")
        async def another():
            return "never"

        @router.get("/own")
        async def own():
            return "stolen"


class Raises:
    @hookimpl
    def http_routes(self, router):
        @router.get("/half")
        async def half():
            return "never"

        raise LookupError("routes")

    @hookimpl
    def metrics(self, registry):
        raise LookupError("metrics")

    @hookimpl
    def http_middleware(self, app):
        raise LookupError("middleware")


class BadCollector:
    @hookimpl
    def metrics(self, registry):
        Counter("bad_things", "Bad.", registry=registry)
        registry.register(self)

    def describe(self):
        return []

    def collect(self):
        raise LookupError("collect")


class SameName:
    @hookimpl
    def metrics(self, registry):
        Counter("good_things", "The same.", registry=registry)


def relay_of(*names):
    found = [Candidate("hooks.frontend", n.lower(), 0, f"dist-{n}", "1.0", f"{__name__}:{n}") for n in names]
    registry = Registry(found)
    return HookRelay("frontend", registry), registry


class Engine:
    async def call(self, method):
        return [{"holders": b"\0\1", "cached": b"\0\0", "retained": b"\0\0"}]


def server(keys=(), admin=None):
    return ServerView(Engine(), collections.Counter(), KeyRing(keys, admin=admin))


def application(relay):
    app, view = FastAPI(), server()
    errors.install(app)

    @app.get("/own")
    async def own():
        return "own"

    add_routes(app, relay, view)
    return Entry(wrap(app, relay, view), view.responses, max_body=10**6, timeout=5)


def ask(app, *paths, headers=None):
    async def get():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [await client.get(path, headers=headers) for path in paths]

    return asyncio.run(get())


def test_without_plugins_nothing_is_in_the_way():
    relay, _ = relay_of()
    app = FastAPI()
    assert wrap(app, relay, server()) is app
    assert PluginMetrics(relay).families() == []


def test_routes_and_middleware():
    relay, registry = relay_of("Good")
    mine, own, refused, late = ask(application(relay), "/mine", "/own", "/no", "/late")
    assert (mine.json(), own.json()) == ("mine", "own")
    assert refused.status_code == 451 and refused.headers["retry-after"] == "2"
    assert refused.json()["error"]["code"] == "request_refused"
    assert late.status_code == 200  # what began cannot be taken back
    assert not registry.quarantine


def test_routes_look_at_the_engine_and_are_open_only_where_marked():
    relay, _ = relay_of("Page", "Good")
    app, view = FastAPI(), server()
    add_routes(app, relay, view)
    assert view.pages == {"/page"}
    page, behind = ask(app, "/page", "/behind")
    assert (page.json(), behind.json()) == ("page", [2])


@pytest.mark.parametrize(("name", "said"), [("OpensTooMuch", "POST /post"), ("OpensAFolder", "GET /files/{name}")])
def test_only_a_page_can_be_without_a_key(name, said, caplog):
    relay, registry = relay_of("Page", name)
    app, view = FastAPI(), server()
    add_routes(app, relay, view)
    assert view.pages == {"/page"}
    post, folder = ask(app, "/post", "/files/a")
    assert (post.status_code, folder.status_code) == (404, 404)
    [error] = registry.quarantine.values()
    assert f"its route {said} cannot be without_key" in str(error)


@pytest.mark.parametrize("name", ["TakesARoute", "Raises"])
def test_broken_routes_are_left_out_whole(name, caplog):
    relay, registry = relay_of("Good", name)
    relay.http_middleware = None
    mine, own, another, half = ask(application(relay), "/mine", "/own", "/another", "/half")
    assert (mine.json(), own.json(), another.status_code, half.status_code) == ("mine", "own", 404, 404)
    [(candidate, error)] = registry.quarantine.items()
    assert candidate.name == name.lower() and "http_routes" in str(error)
    assert f"dist-{name}" in caplog.text and relay.failures[name.lower(), "http_routes"] == 1


def test_middleware_that_cannot_be_set_up_refuses_everything_but_for_monitors():
    relay, _ = relay_of("Raises", "Good")
    own, health = ask(application(relay), "/own", "/health")
    assert own.status_code == 503 and own.json()["error"]["code"] == "hook_failed"
    assert "dist-Raises" in own.text and "LookupError" not in own.text
    assert health.status_code == 404  # this small app has none; but it was asked


class AsksForKeys:
    @hookimpl
    def http_middleware(self, app, server):
        return Keys(app, server.take_keys(), server.pages)


def test_a_server_with_keys_that_nobody_asks_for_does_not_start():
    all_ = HookRelay("frontend", Registry.discover())
    without = HookRelay("frontend", Registry.discover((), PluginList("-hooks:api_keys")))
    for keys, admin in ((("k",), None), ((), "a")):
        for relay, asked in ((all_, True), (without, False), (relay_of("AsksForKeys")[0], True)):
            view = server(keys, admin)
            wrap(FastAPI(), relay, view)
            with contextlib.nullcontext() if asked else pytest.raises(ConfigError, match="hooks:api_keys"):
                view.check_keys()
    server().check_keys()  # an open one may do without


def test_a_stranger_takes_the_place_of_what_asks_for_keys():
    relay, _ = relay_of("AsksForKeys")
    app, view = FastAPI(), server(("mine",))
    wrapped = Entry(wrap(app, relay, view), view.responses, max_body=10**6, timeout=5)
    assert [one.status_code for one in ask(wrapped, "/x")] == [401]
    assert [one.status_code for one in ask(wrapped, "/x", headers={"x-api-key": "mine"})] == [404]
    assert view.responses == {401: 1, 404: 1}


def test_metrics_of_a_broken_plugin_cost_only_its_own(caplog):
    relay, _ = relay_of("Good", "BadCollector", "SameName", "Raises")
    metrics = PluginMetrics(relay)
    for count in (1, 2):
        text = generate_latest(Families(metrics.families())).decode()
        # registered by name: badcollector, good, raises, samename; the last registered is called first
        assert text.count("# TYPE good_things_total counter") == 1 and "The same." in text
        assert "bad_things" not in text
        assert relay.failures[("badcollector", "metrics")] == relay.failures[("good", "metrics")] == count
    assert relay.failures[("raises", "metrics")] == 1
    assert "somebody has the metric good_things" in caplog.text


def test_what_hooks_are_told_holds_no_secret():
    from starlette.requests import Request

    secret = [
        "authorization",
        "proxy-authorization",
        "cookie",
        "x-api-key",
        "api-key",
        "x-auth-token",
        "x-client-secret",
    ]
    headers = [(name.encode(), b"hush") for name in secret] + [(b"x-user", b"ann"), (b"x-user", b"bob")]
    scope = {"type": "http", "method": "POST", "path": "/p", "query_string": b"key=hush", "headers": headers}
    told = origin(Request({**scope, "client": ("1.2.3.4", 5), "server": ("x", 80), "scheme": "http"}))
    assert "hush" not in repr(told)
    assert (told.method, told.path, told.client, told.headers) == ("POST", "/p", "1.2.3.4", {"x-user": "ann, bob"})
