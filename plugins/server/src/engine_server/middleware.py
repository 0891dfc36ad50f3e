"""What every request passes, from the connection to its route: `Entry`, the middleware of plugins (`Keys` is this
package's own), `Dispatch`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, NamedTuple, cast, get_type_hints

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_kit.logs import REQUEST_ID
from engine_server.bodies import LARGE, MOST, Count, JSONRoute, count, read_json
from engine_server.errors import APIError, refuse, speaks_anthropic, try_again
from engine_server.keys import ApiKey, KeyRing
from engine_server.lifecycle import ACCESS_LOG, ENDED_AS, Lifecycle, Phase
from engine_server.state import State
from engine_server.stream import DIRECT_SEND, EXTENSION, WRITE_BODY

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"
OWN_SEND = "own_send"
"""In the state of a request with a body: the `send` that the server gives to the middleware of plugins."""
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
LONGEST_LABEL = 256
"""Characters of the client's own user that are logged."""
_BEGUN = "answer_begun"
_VALID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")

log = logging.getLogger(ACCESS_LOG)


class Entry:
    """ASGI middleware, the outermost: ids, the access log, and limits on bodies.

    A client's id that is too long or holds other characters than A-Z a-z 0-9 . _ : + / = @ - is not used: a new one is
    made, and the answer tells which.

    Whoever asks for the body first gets all of it in one message. A body whose declared length is over the limit is
    refused without being read; one of undeclared length as soon as it has grown too long. What a large one of JSON
    holds is counted in a thread, before anybody reads it. Where the body is refused, that is the answer, whatever else
    is sent; who asked for the body is told that the client has left.

    Args:
        app: what stands behind.
        responses: is counted up: answers by status code.
        max_body: bytes.
        timeout: seconds for the whole body.
        most: that a body of JSON may hold.
        origins: of the browsers that may ask; what they ask first is answered here.
    """

    def __init__(
        self,
        app: ASGIApp,
        responses: Counter[int],
        *,
        max_body: int,
        timeout: float,
        most: Count = MOST,
        access_log: bool = False,
        origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._responses = responses
        self._max_body = max_body
        self._timeout = timeout
        self._most = most
        self._access_log = access_log
        self._inside: ASGIApp = self._with_limits
        if origins:
            exposed = ["X-Request-Id", "Retry-After"]
            every = ["*"]
            self._inside = CORSMiddleware(
                self._with_limits,
                allow_origins=origins,
                allow_methods=every,
                allow_headers=every,
                expose_headers=exposed,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = _header(scope, HEADER)
        made = sent is None or _VALID.fullmatch(sent) is None
        identity = uuid.uuid4().hex.encode() if sent is None or made else sent
        # Two requests may carry the same id; inside, each needs its own.
        unique = identity.decode() + ("" if made else f"-{uuid.uuid4().hex[:8]}")
        state = scope.setdefault("state", {})
        state.update(request_id=identity.decode(), unique_id=unique)
        status = 0
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._responses[status] += 1
                state[_BEGUN] = True
                names = (HEADER, ANTHROPIC_HEADER) if speaks_anthropic(scope) else (HEADER,)
                message["headers"] = [*message.get("headers", ()), *((name, identity) for name in names)]
            await send(message)

        context = REQUEST_ID.set(identity.decode())
        try:
            await self._inside(scope, receive, send_with_id)
        except Exception:
            if 0 < status < 400:  # a plugin's stream: the client was told otherwise
                state[ENDED_AS] = 500
            raise
        finally:
            if self._access_log:
                _log_access(scope, status, time.perf_counter() - began)
            REQUEST_ID.reset(context)

    async def _with_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let nobody read more than may be sent."""
        if scope["method"] in _WITHOUT_BODY:
            return await self._app(scope, receive, send)
        asked = answered = refused = False

        async def limited() -> Message:
            nonlocal asked, refused
            if asked or answered:
                return await receive()
            asked = True
            body: bytes | None = None
            try:
                body = await self._body(scope, receive)
                if body is None:
                    return {"type": "http.disconnect"}
                if len(body) > self._max_body:
                    raise self._too_long(f"has {len(body)} bytes")
                if len(body) >= LARGE and b"json" in (_header(scope, b"content-type") or b"json").lower():
                    self._check(await asyncio.to_thread(count, body))
            except APIError as error:
                refused = True
                await refuse(scope, receive, send, error, close=body is None)
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": body, "more_body": False}

        async def unless_refused(message: Message) -> None:
            nonlocal answered
            answered = True
            if not refused:
                await send(message)

        scope.setdefault("state", {})[OWN_SEND] = unless_refused
        await self._app(scope, limited, unless_refused)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """None where the client left before it was complete. Raises the APIError that refuses it before its end."""
        declared = _header(scope, b"content-length")
        if declared is not None and int(declared) > self._max_body:
            raise self._too_long(f"has {int(declared)} bytes")
        try:
            async with asyncio.timeout(self._timeout):
                return await self._read(receive)
        except TimeoutError:
            found = f"the body was not complete after {self._timeout:g} s (--body-timeout)"
            raise APIError(408, f"{found}; send it faster, or a smaller one", code="body_timeout") from None

    async def _read(self, receive: Receive) -> bytes | None:
        chunks: list[bytes] = []
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            length += len(chunk)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)
            if length > self._max_body:
                raise self._too_long("goes on")

    def _check(self, found: Count) -> None:
        for what, held, most in zip(("texts, lists and objects", "values"), found, self._most, strict=True):
            if held > most:
                raise _too_large(f"holds {held:,} {what}", f"{most:,}; send several smaller requests")

    def _too_long(self, found: str) -> APIError:
        return _too_large(found, f"{self._max_body} bytes (--max-body); send a smaller request")


def _too_large(found: str, most: str) -> APIError:
    return APIError(413, f"the body {found}; this server takes up to {most}", code="body_too_large")


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    state, method, path = scope["state"], scope["method"], scope["path"]
    ended_as = state.get(ENDED_AS)
    status = ended_as or status
    client = "{}:{}".format(*scope["client"]) if scope.get("client") else "-"
    line = f"{client} {method} {path} {status or 'left'} {seconds:.3f} s"
    fields = {"client": client, "method": method, "path": path, "status": status or None, "seconds": round(seconds, 6)}
    if ended_as is not None:
        line, fields["in_stream"] = f"{line}, in mid-stream", True
    if user := state.get("end_user"):
        line, fields["user"] = f"{line}, for {user}", user
    shown = line.encode("unicode_escape").decode()
    log.info("%s %s", state["request_id"], shown, extra={"fields": fields})


def has_begun(scope: Scope) -> bool:
    """Whether the answer to a request has begun."""
    return _BEGUN in scope["state"]


def request_id(request: Request) -> str:
    """The id that the answer carries."""
    return cast(str, request.scope["state"]["request_id"])


def engine_id(request: Request, prefix: str) -> str:
    """An id for the engine and for the answer's `id`, as OpenAI's look, e.g. "chatcmpl-3f2a..."; it contains the
    request's, and is used once."""
    return f"{prefix}-{request.scope['state']['unique_id']}"


def note(request: Request, *users: str | None, cache_salt: str | None = None) -> None:
    """Remember of a request whom the client names as its own user (the first that is given), for the access log, and
    the salt of its prompts in the prefix cache, beside that of its API key."""
    state = request.scope.setdefault("state", {})
    if user := next(filter(None, users), None):
        state["end_user"] = user[:LONGEST_LABEL]
    if cache_salt is not None:
        state["own_salt"] = cache_salt


OPEN_PATHS = frozenset({"/health", "/load", "/metrics", "/ping", "/ready", "/version"})
"""Answered always and to everybody: what load balancers and monitors look at."""
PAGE_METHODS = frozenset({"GET", "HEAD"})
"""With which everybody gets the pages of plugins that are marked `without_key`."""
ADMIN_PATH = "/admin"
"""What lies below it is for whoever has the administrator's key, and for nobody else."""
STARTING_RETRY_SECONDS = 5


def is_open(scope: Scope, pages: Collection[str]) -> bool:
    """Whether a request is answered always and to everybody."""
    path: str = scope["path"]
    return path in OPEN_PATHS or (path in pages and scope["method"] in PAGE_METHODS and not is_for_admin(path))


def is_for_admin(path: str) -> bool:
    """Whether a path lies below ADMIN_PATH."""
    return path == ADMIN_PATH or path.startswith(ADMIN_PATH + "/")


class Keys:
    """ASGI middleware: nobody is let in without a key that fits (an empty ring lets everybody in), and with each key no
    more than it may ask for. `pages` are paths that everybody may get."""

    def __init__(self, app: ASGIApp, keys: KeyRing, pages: Collection[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope, self._pages):
            return await self._app(scope, receive, send)
        administers = is_for_admin(scope["path"])
        key: ApiKey | None = None
        if self._keys or administers:
            headers = dict(reversed(scope["headers"]))  # of several with one name the first counts
            sent = headers.get(b"authorization", b""), headers.get(b"x-api-key")
            key = self._keys.find(*sent)
            error: APIError | None = None
            if administers:
                error = self._no_administrator(sent, key)
            elif key is None:
                error = _unknown("no valid API key was sent")
            else:
                entered = key.usage.enter()
                error = entered if entered is None or isinstance(entered, APIError) else await entered
            if error is not None:
                return await refuse(scope, receive, send, error, close=True)
        state = scope.setdefault("state", {})
        if administers or key is None:
            state["administers"] = administers
            return await self._app(scope, receive, send)
        state.update(api_key=key.name, cache_salt=key.cache_salt, key_usage=key.usage)
        try:
            await self._app(scope, receive, send)
        finally:
            key.usage.leave()

    def _no_administrator(self, sent: tuple[bytes, bytes | None], key: ApiKey | None) -> APIError | None:
        if not self._keys.administered:
            found = "this server has no routes for administrators; start it with --admin-key to have them"
            return APIError(403, found, code="admin_disabled")
        if self._keys.find_administrator(*sent):
            return None
        if key is not None:
            return APIError(403, "an API key does not open this; send the administrator's", code="admin_key_required")
        return _unknown("the administrator's key was not sent")


def _unknown(why: str) -> APIError:
    message = f"{why}; send one as 'Authorization: Bearer <key>'"
    return APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


_KNOWN = {"request": Request, "state": State}
"""What a function may ask for beside its body."""


class Dispatch:
    """ASGI middleware, the innermost: takes requests only while the server serves, counts those in progress, and hands
    each to its route. While the server leaves, who comes is told to come back in `shutdown_timeout` seconds. What lies
    below /admin is closed, whosever route it is, unless a middleware has found an administrator:
    `state["administers"]`.

    Requests that somebody waits for go around the framework: those of a route that takes a body of JSON and nothing
    else are handed to its function, and the tokens of its answer to the connection. FastAPI's own way takes some 90
    microseconds more for a chat request, a tenth of all that the server adds to its first token: six layers of
    middleware, the search for the route, the resolution of its parameters. The framework sees such a request when its
    body is there, and only where the body does not fit the route's model: it is refused in the framework's words.

    Args:
        app: the framework's, with all its routes and handlers of errors.
        pages: everybody may get them at any time.
    """

    def __init__(
        self, app: FastAPI, *, lifecycle: Lifecycle, shutdown_timeout: float, pages: Collection[str] = ()
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._pages = pages
        self._leaving_seconds = max(1, math.ceil(shutdown_timeout))
        routes = [route for route in app.routes if isinstance(route, JSONRoute)]
        self._functions = {route.path: one for route in routes if (one := _function(route)) is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope, self._pages):
            return await self._app(scope, receive, send)
        if self._lifecycle.phase is not Phase.SERVING:
            why, seconds, code = "the model is being loaded", STARTING_RETRY_SECONDS, "starting"
            if self._lifecycle.phase is Phase.DRAINING:
                why, seconds, code = "the server is shutting down", self._leaving_seconds, "shutting_down"
            return await refuse(scope, receive, send, try_again(503, why, seconds, code), close=True)
        self._lifecycle.enter()
        try:
            await self._serve(scope, receive, send)
        finally:
            self._lifecycle.leave()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state[DIRECT_SEND] = send
        if is_for_admin(scope["path"]) and state.get("administers") is not True:
            error = APIError(403, "this is for administrators", code="admin_key_required")
            return await refuse(scope, receive, send, error, close=True)
        if (own := state.get(OWN_SEND)) is None:  # without a body
            return await self._app(scope, receive, send)
        if own is send:  # no middleware of a plugin looks at what is sent
            state[WRITE_BODY] = scope.get("extensions", {}).get(EXTENSION)
        first = await receive()
        if first["type"] == "http.disconnect":  # the client has left, or the body was refused
            return
        function = self._functions.get(scope["path"]) if scope["method"] == "POST" else None
        kind = (_header(scope, b"content-type") or b"").partition(b";")[0].strip()
        if function is None or first.get("more_body") or kind != b"application/json":
            return await self._app(scope, _again(first, receive), send)
        try:
            body = function.model.model_validate(await read_json(scope, first["body"]))
        except Exception:  # it does not fit, or a model's own check fails over it: the framework finds the same
            return await self._app(scope, _again(first, receive), send)
        scope["app"] = self._app
        request = Request(scope, receive)
        asked = {"body": body, "request": request, "state": self._app.state.server}
        try:
            response = await function.call(**{name: asked[name] for name in function.names})
        except Exception as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)

    async def _answer(self, request: Request, error: Exception) -> Response:
        handlers = self._app.exception_handlers
        handler: Any = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
        response: Response = await handler(request, error)
        return response


class _Function(NamedTuple):
    """A route's: what it takes as its body, and the names of all that it takes."""

    call: Callable[..., Coroutine[Any, Any, Response]]
    model: type[BaseModel]
    names: tuple[str, ...]


def _function(route: JSONRoute) -> _Function | None:
    """None for a route that asks for more than a body, the request and the state, or for no body, or that answers with
    something that FastAPI makes a response of."""
    if "POST" not in (route.methods or ()) or "{" in route.path or route.dependencies:
        return None
    parameters = inspect.signature(route.endpoint).parameters
    if not inspect.iscoroutinefunction(route.endpoint) or parameters.keys() - {"body"} - _KNOWN.keys():
        return None
    if any(parameter.default is not parameter.empty for parameter in parameters.values()):
        return None  # `Depends(...)`, or another way to read the body
    try:
        hints = get_type_hints(route.endpoint, include_extras=True)
    except (NameError, TypeError):  # what cannot be resolved, and a partial function, are FastAPI's to read
        return None
    model, answer = hints.get("body"), hints.get("return")
    if any(hints.get(name) != _KNOWN[name] for name in parameters.keys() & _KNOWN.keys()):
        return None
    if not (inspect.isclass(model) and issubclass(model, BaseModel)):
        return None
    fits = inspect.isclass(answer) and issubclass(answer, Response)
    return _Function(route.endpoint, model, tuple(parameters)) if fits else None


def _again(first: Message, receive: Receive) -> Receive:
    """A `receive` that gives the first message once more, and then what follows."""
    pending = [first]

    async def received() -> Message:
        return pending.pop() if pending else await receive()

    return received


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The first of this name."""
    return next((value for sent, value in scope["headers"] if sent == name), None)
