"""A hook plugin that writes down every call it gets, one JSON line each; and decides as its options say.

Installed by the tests of this folder, in a distribution of its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
from pydantic import BaseModel

from engine.plugin import hookimpl
from engine.types.errors import RequestRefusedError


class Options(BaseModel):
    path: Path
    refuse: str = ""
    """Ids that hold this are refused."""
    fail: str = ""
    """Hooks that raise, by name, with commas."""
    suffix: str = ""
    upper: bool = False


class Recorder:
    Options = Options

    def __init__(self, options: Options) -> None:
        self.options = options

    def note(self, hook: str, **values: object) -> None:
        line = {"hook": hook, "pid": os.getpid(), **{name: msgspec.to_builtins(v) for name, v in values.items()}}
        with self.options.path.open("a") as file:
            file.write(json.dumps(line, default=repr) + "\n")
        if hook in self.options.fail.split(","):
            raise LookupError(f"{hook} has a fault")


class Frontend(Recorder):
    @hookimpl
    def engine_started(self, info):
        self.note("engine_started", info=info)

    @hookimpl
    def engine_stopping(self):
        self.note("engine_stopping")

    @hookimpl
    def admit(self, request):
        self.note("admit", request=request)
        http = request.http
        if self.options.refuse and http is not None and self.options.refuse in http.headers.get("x-user", ""):
            raise RequestRefusedError("a request", "too many of yours", "wait", status=429, retry_after=2.5)
        if self.options.refuse and self.options.refuse == request.request_id:
            raise RequestRefusedError("a request", "its id is not liked", status=403)

    @hookimpl
    def rewrite_prompt(self, prompt, request):
        self.note("rewrite_prompt", prompt=prompt)
        return prompt + self.options.suffix if self.options.suffix else None

    @hookimpl
    def output_filter(self, request, index):
        self.note("output_filter", index=index)
        if not self.options.upper:
            return None

        def shout(text, last):
            if "shout" in self.options.fail.split(","):
                raise LookupError("shout has a fault")
            return text.upper()

        return shout

    @hookimpl
    def request_received(self, request):
        self.note("request_received", request_id=request.request_id)

    @hookimpl
    def request_finished(self, summary):
        self.note("request_finished", summary=summary)

    @hookimpl
    def stats(self, stats):
        self.note("stats", stats=stats)

    @hookimpl
    def http_routes(self, router, server):
        self.note("http_routes")

        @router.get("/plugin/hello")
        async def hello() -> dict[str, str]:
            return {"hello": "world"}

        @router.get("/plugin/pages")
        async def pages() -> dict[str, object]:
            [told] = await server.page_maps()
            stats = server.stats()
            tokens = None if stats is None else stats.generation_tokens
            return {"pages": len(told.holders), "cached": sum(told.cached), "tokens": tokens}

        @router.get("/plugin/refuses")
        async def refuses() -> None:
            raise RequestRefusedError("a route", "it says no", status=429, retry_after=7)

    @hookimpl
    def metrics(self, registry):
        self.note("metrics")
        from prometheus_client import Counter

        Counter("plugin_things", "Things.", registry=registry).inc(3)

    @hookimpl
    def http_middleware(self, app):
        self.note("http_middleware")

        async def layer(scope, receive, send):
            if scope["type"] == "http" and scope["path"] == "/plugin/raise":
                raise LookupError("the middleware has a fault")
            if scope["type"] == "http" and scope["path"] == "/plugin/forbidden":
                raise RequestRefusedError("that page", "not for you", status=451)

            async def marked(message):
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-plugin", b"was-here")]
                await send(message)

            await app(scope, receive, marked)

        return layer


class Core(Recorder):
    @hookimpl
    def step_done(self, stats):
        self.note("step_done", stats=stats)

    @hookimpl
    def kv_events(self, events):
        self.note("kv_events", events=len(events))


class Worker(Recorder):
    @hookimpl
    def worker_started(self, info):
        self.note("worker_started", info=info)

    @hookimpl
    def worker_stopping(self, info):
        self.note("worker_stopping", info=info)
