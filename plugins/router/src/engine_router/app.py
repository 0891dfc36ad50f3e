"""The application: what comes in goes to one server, or to two, and what they answer is passed on as it comes.

Bytes are passed on unread. Of an answer that streams events only whole ones are, so that one whose server dies in
mid-stream ends with an event that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

import engine
from engine.types.errors import ConfigError, EngineError
from engine.types.request import EngineRequest
from engine_router.backends import Backend, Group, routed_by
from engine_router.connections import Answer, Headers, Lost, Unreachable, ask_json_bytes
from engine_router.disaggregation import divisible, for_decode, for_prefill, found_params
from engine_router.metrics import Page, add_own, labels_of
from engine_server.anthropic.routes import tell_error as messages_error
from engine_server.bodies import dumps
from engine_server.errors import APIError, describe, invalid, refuse, speaks_anthropic
from engine_server.lifecycle import ENDED_AS, Lifecycle, Phase
from engine_server.responses.answer import tell_error as responses_error
from engine_server.stream import CLIENT_GONE, ClientGone, TellError, openai_error, until_disconnect

T = TypeVar("T")
Ahead = Literal["push", "follow"]

MOST_REMEMBERED = 2**16
"""Responses whose server is remembered."""
LOOK_SECONDS = 5.0
"""In which a server has to tell its metrics or its settings."""
_BETWEEN_TWO = (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade")
_HOP = frozenset((*_BETWEEN_TWO, b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id"))
"""Headers of requests that are between two programs, or that the router says itself."""
_OWN = frozenset((*_BETWEEN_TWO, b"date", b"server", b"x-request-id", b"request-id"))
"""Headers of answers that the router's server writes."""
_RESPONSE_ID = re.compile(rb'"id": ?"(resp_[\w-]+)"')
_OF_A_RESPONSE = re.compile(r"/v1/responses/([^/]+)")


class Counts:
    """What the router counts beside what each server does.

    Attributes:
        whole: requests that were to be divided and were not, by why.
        responses: answers by status.
    """

    def __init__(self) -> None:
        self.whole: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()


class RouterApp:
    """ASGI application. Stands behind `engine_server.middleware.Entry`, which gives requests ids and reads bodies.

    Args:
        group: servers that answer requests, or go on with them.
        prefill: those that compute prompts for these; None: nobody does.
        ahead: servers that go on are asked at once, and take what is computed while the rest is: "push" where the
            others push it, "follow" where these pull it; None: when all is computed.
    """

    def __init__(
        self, group: Group, prefill: Group | None, lifecycle: Lifecycle, counts: Counts, *, ahead: Ahead | None = None
    ) -> None:
        self._group = group
        self._prefill = prefill
        self._ahead = ahead
        self._lifecycle = lifecycle
        self._counts = counts
        self._owners: OrderedDict[str, Backend] = OrderedDict()
        self._pages = {"/health": self._health, "/ping": self._health, "/ready": self._ready, "/metrics": self._metrics}
        self._pages |= {"/version": self._version, "/load": self._load}

    @property
    def backends(self) -> list[Backend]:
        """All servers."""
        return [*(() if self._prefill is None else self._prefill.backends), *self._group.backends]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            if (page := self._pages.get(scope["path"])) is not None:
                return await page(send)
            if self._lifecycle.phase is not Phase.SERVING:
                raise APIError(503, "the router is shutting down; send it to another", code="shutting_down")
            if scope["path"].startswith("/admin"):
                found = "the router administers nothing; ask each server itself"
                raise APIError(404, found, code="not_found")
            self._lifecycle.enter()
            try:
                await self._serve(scope, receive, send)
            finally:
                self._lifecycle.leave()
        except (APIError, EngineError) as error:
            if isinstance(error, EngineError):
                status, told = describe(error)
                error = APIError(status, told.message, code=told.code)
            await refuse(scope, receive, send, error)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        if scope["method"] not in ("GET", "HEAD"):
            first = await receive()
            if first["type"] == "http.disconnect":  # the client has left, or the body was refused
                return
            body = first["body"]
        try:
            await until_disconnect(receive, Passage(self, scope, body, send).run())
        except ClientGone:
            scope["state"][ENDED_AS] = CLIENT_GONE

    # -- what passages ask ---------------------------------------------------------------------------------------------
    @property
    def group(self) -> Group:
        """Servers that answer."""
        return self._group

    @property
    def prefill(self) -> Group | None:
        """Servers that compute prompts."""
        return self._prefill

    @property
    def ahead(self) -> Ahead | None:
        """See the arguments."""
        return self._ahead

    @property
    def listening(self) -> Sequence[Backend]:
        """Servers that others connect to, by the order of work."""
        if self._prefill is None or self._ahead is None:
            return ()
        return (self._group if self._ahead == "push" else self._prefill).backends

    def whole(self, why: str) -> None:
        """Count a request that is not divided."""
        self._counts.whole[why] += 1

    def owner(self, response_id: str | None) -> Backend | None:
        """Which server keeps a response, where that is known."""
        return None if response_id is None else self._owners.get(response_id)

    def owns(self, backend: Backend, piece: bytes) -> None:
        """Remember where a response is kept, of whose answer this is the beginning."""
        if found := _RESPONSE_ID.search(piece):
            self._owners[found[1].decode()] = backend
            while len(self._owners) > MOST_REMEMBERED:
                self._owners.popitem(last=False)

    # -- pages of the router's own -------------------------------------------------------------------------------------
    def _serves(self) -> bool:
        """One server that goes on can do without those that compute prompts."""
        return self._lifecycle.phase is Phase.SERVING and any(one.alive for one in self._group.backends)

    async def _health(self, send: Send) -> None:
        serves = self._serves()
        status = ("ok" if all(one.alive for one in self.backends) else "degraded") if serves else "unavailable"
        told = [{"backend": one.name, "role": one.role, "alive": one.alive} for one in self.backends]
        await _answer(send, {"status": status, "backends": told}, 200 if serves else 503)

    async def _ready(self, send: Send) -> None:
        serves = self._serves()
        status = self._lifecycle.phase.value if serves or self._lifecycle.phase is not Phase.SERVING else "dead"
        await _answer(send, {"status": status}, 200 if serves else 503)

    async def _load(self, send: Send) -> None:
        rows = [(one, one.load()) for one in self.backends]
        told = [
            {
                "backend": one.name,
                "role": one.role,
                "running": load.num_running,
                "waiting": load.num_waiting,
                "kv_cache_usage": load.kv_usage,
            }
            for one, load in rows
        ]
        await _answer(send, {"server_load": self._lifecycle.active, "backends": told})

    async def _version(self, send: Send) -> None:
        await _answer(send, {"version": engine.__version__})

    async def _metrics(self, send: Send) -> None:
        """Of all servers; one that does not answer is left out."""

        async def of_one(backend: Backend) -> str:
            with contextlib.suppress(Unreachable, Lost, TimeoutError):
                status, body = await ask_json_bytes(backend.pool, "/metrics", LOOK_SECONDS)
                return body.decode(errors="replace") if status == 200 else ""
            return ""

        page = Page()
        for backend, text in zip(self.backends, await asyncio.gather(*map(of_one, self.backends)), strict=True):
            page.add(text, labels_of(backend))
        add_own(page, self.backends, self._counts.whole, self._counts.responses)
        await _send(send, 200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")], page.text().encode())


class Passage:
    """One request on its way through."""

    def __init__(self, app: RouterApp, scope: Scope, body: bytes, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._body = body
        self._send = send
        self._path: str = scope["path"]
        query: bytes = scope.get("query_string", b"")
        raw: bytes = scope.get("raw_path") or self._path.encode()
        self._target = raw.decode("ascii", "replace") + (f"?{query.decode('ascii', 'replace')}" if query else "")
        self._method = "GET" if scope["method"] == "HEAD" else scope["method"]
        kept = [(name, value) for name, value in scope["headers"] if name not in _HOP]
        self._headers: Headers = [*kept, (b"x-request-id", scope["state"]["request_id"].encode())]
        self._lost_once = False

    async def run(self) -> None:
        """Until its answer has ended. Raises APIError before it has begun."""
        if (found := _OF_A_RESPONSE.match(self._path)) is not None:
            return await self._to_owner(found[1])
        data = self._data() if self._body else None
        read = self._data_as_servers_do() if data is None else data
        if read.get("kv_transfer_params") is not None:  # they name addresses that servers connect to
            raise invalid("kv_transfer_params", "these are what servers tell each other; leave them out")
        if data is None:
            return await self._to_one(self._app.group, routed_by({}, b""), self._body)
        auth = next((value for name, value in self._headers if name in (b"authorization", b"x-api-key")), b"")
        request = routed_by(data, auth)
        previous = data.get("previous_response_id")
        if isinstance(previous, str) and (owner := self._app.owner(previous)) is not None:
            return await self._to_keepers((owner,))
        if self._app.prefill is None or not divisible(self._path, data):
            return await self._to_one(self._app.group, request, self._body)
        if self._app.ahead is not None:
            return await self._at_once(request, data, self._app.ahead)
        params = await self._prefilled(request, data)
        body = self._body if params is None else dumps(for_decode(data, params))
        return await self._to_one(self._app.group, request, body)

    def _data(self) -> dict[str, Any] | None:
        """The body's; None for one that is no object, which the server that gets it refuses in its own words."""
        with contextlib.suppress(orjson.JSONDecodeError):
            data = orjson.loads(self._body)
            return data if isinstance(data, dict) else None
        return None

    def _data_as_servers_do(self) -> dict[str, Any]:
        """The body's, where only Python's own reader takes it, with its NaN and halves of characters; else nothing."""
        with contextlib.suppress(ValueError, RecursionError):
            data = json.loads(self._body)
            return data if isinstance(data, dict) else {}
        return {}

    # -- to one server -------------------------------------------------------------------------------------------------
    async def _to_one(self, group: Group, request: EngineRequest, body: bytes) -> None:
        backend, answer = await self._ask_any(group, request, body)
        await self._pass_on(backend, answer)

    async def _ask_any(self, group: Group, request: EngineRequest, body: bytes) -> tuple[Backend, Answer]:
        """The answer of the first server that gives one: another is asked where one cannot be reached or does not
        serve, and once where one died over it. Raises APIError where none is left."""
        tried: set[Backend] = set()
        while (backend := group.choose(request, tried)) is not None:
            tried.add(backend)
            try:
                answer = await self._ask(backend, body)
            except Unreachable:
                continue
            except Lost:
                if self._lost_once:  # it may be what they die of
                    break
                self._lost_once = True
                continue
            if answer.status != 503 or all(other in tried for other in group.backends):
                return backend, answer
            self._leave(backend, answer)
        found = f"none of {len(group.backends)} servers answers; try again in 1 s"
        raise APIError(503, found, code="no_backend", headers={"Retry-After": "1"})

    async def _ask(self, backend: Backend, body: bytes) -> Answer:
        """Whoever gets the answer calls `_leave`. One that streams no events is complete by then."""
        backend.active += 1
        answer: Answer | None = None
        try:
            answer = await backend.pool.ask(self._method, self._target, self._headers, body)
            if not answer.events:
                await answer.read()
        except BaseException as error:
            backend.active -= 1
            if answer is not None:
                answer.close()
            if isinstance(error, Unreachable):
                backend.counts["unreachable"] += 1
                backend.died(str(error))
            elif isinstance(error, Lost):
                backend.counts["lost"] += 1
            raise
        backend.counts[str(answer.status)] += 1
        return answer

    def _leave(self, backend: Backend, answer: Answer) -> None:
        backend.active -= 1
        answer.close()

    async def _pass_on(self, backend: Backend, answer: Answer, first: bytes | None = None) -> None:
        """Give the client what the server answers. `first`: what of its events has been read already."""
        headers = [(name, value) for name, value in answer.headers if name not in _OWN]
        try:
            await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
            if answer.events:
                await self._pass_events(backend, answer, first)
            elif self._path == "/v1/responses":
                self._app.owns(backend, answer.content)
            await self._send({"type": "http.response.body", "body": answer.content, "more_body": False})
        finally:
            self._leave(backend, answer)

    async def _pass_events(self, backend: Backend, answer: Answer, first: bytes | None) -> None:
        held = b""
        try:
            piece = await answer.piece() if first is None else first
            if self._path == "/v1/responses":
                self._app.owns(backend, piece)
            while piece:
                end = piece.rfind(b"\n\n") + 2
                if end > 1:
                    whole, held = held + piece[:end], piece[end:]
                    await self._send({"type": "http.response.body", "body": whole, "more_body": True})
                else:
                    held += piece
                piece = await answer.piece()
        except Lost:
            backend.counts["lost"] += 1
            lost = APIError(503, "the server that answered has died; send the request again", code="backend_lost")
            state = self._scope["state"]
            state[ENDED_AS], held = self._tell_error()(lost, state["request_id"])
        if held:
            await self._send({"type": "http.response.body", "body": held, "more_body": True})

    def _tell_error(self) -> TellError:
        if speaks_anthropic(self._scope):
            return messages_error
        return responses_error if self._path == "/v1/responses" else openai_error

    # -- to two --------------------------------------------------------------------------------------------------------
    async def _prefilled(self, request: EngineRequest, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """Let the prompt be computed; what the server that goes on is to be told, None where it computes the prompt
        itself: no server for prompts is left, or none could."""
        assert self._app.prefill is not None
        try:
            backend, answer = await self._ask_any(self._app.prefill, request, dumps(for_prefill(self._path, data)))
        except APIError:
            self._app.whole("no_prefill_server")
            return None
        self._lost_once = False
        self._leave(backend, answer)
        if answer.status != 200:  # what is wrong with it, the other server says in its own words
            self._app.whole("prefill_refused")
            return None
        with contextlib.suppress(orjson.JSONDecodeError):
            if (params := found_params(orjson.loads(answer.content))) is not None:
                return params
        self._app.whole("prefill_without_transfer")
        return None

    async def _at_once(self, request: EngineRequest, data: Mapping[str, Any], ahead: Ahead) -> None:
        """Ask both servers, the one that goes on to make room, and let the KV cache travel while it is computed. Where
        the prompt cannot be computed elsewhere, the first is asked anew, to do so itself, unless it has begun to
        answer."""
        assert self._app.prefill is not None
        receiver = self._app.group.choose(request, set())
        only = None if ahead == "push" else self._app.prefill.choose(request, set())
        listens = receiver if ahead == "push" else only
        place = None
        if listens is not None:
            with contextlib.suppress(ConfigError):
                place = await place_of(listens)
        if receiver is None or place is None:
            self._app.whole("no_place")
            return await self._to_one(self._app.group, request, self._body)
        named = {"remote_request_id": f"{ahead}-{uuid.uuid4().hex}", ahead: True}
        told = {"do_remote_prefill": True, "do_remote_decode": False, **named}
        if ahead == "push":
            body = dumps(for_prefill(self._path, data, {**named, **place}))
        else:
            told |= place
            body = dumps(for_prefill(self._path, data, named))
        going_on = asyncio.ensure_future(self._first_piece(receiver, dumps(for_decode(data, told))))
        pushing = asyncio.ensure_future(self._computed(request, body, only))
        passed_on = False
        try:
            await asyncio.wait((going_on, pushing), return_when=asyncio.FIRST_COMPLETED)
            if not going_on.done() and not pushing.result():
                going_on.cancel()
            await asyncio.wait((going_on,))
            if going_on.cancelled() or going_on.exception() is not None:
                self._app.whole("push_failed")
                return await self._to_one(self._app.group, request, self._body)
            answer, first = going_on.result()
            passed_on = True
            await self._pass_on(receiver, answer, first)
        finally:
            await _ended(pushing)
            if (begun := await _ended(going_on)) is not None and not passed_on:
                self._leave(receiver, begun[0])

    async def _first_piece(self, backend: Backend, body: bytes) -> tuple[Answer, bytes]:
        """The answer, once its body has begun."""
        answer = await self._ask(backend, body)
        try:
            return answer, await answer.piece() if answer.events else b""
        except BaseException:
            self._leave(backend, answer)
            raise

    async def _computed(self, request: EngineRequest, body: bytes, only: Backend | None) -> bool:
        """Whether a server has computed the prompt: `only` this one, where it is named to the other."""
        assert self._app.prefill is not None
        try:
            if only is None:
                backend, answer = await self._ask_any(self._app.prefill, request, body)
            else:
                backend, answer = only, await self._ask(only, body)
        except (APIError, Unreachable, Lost):
            return False
        self._leave(backend, answer)
        return answer.status == 200

    # -- responses that are kept ---------------------------------------------------------------------------------------
    async def _to_owner(self, response_id: str) -> None:
        """To the server that keeps a response; where that is not known, to the first that does not say that it is not
        there."""
        owner = self._app.owner(response_id)
        await self._to_keepers(self._app.group.backends if owner is None else (owner,))

    async def _to_keepers(self, several: Sequence[Backend]) -> None:
        """To the first of these that does not answer 404, or else to the last. Raises APIError where none answers."""
        found: tuple[Backend, Answer] | None = None
        for backend in several:
            try:
                answer = await self._ask(backend, self._body)
            except (Unreachable, Lost):
                continue
            if found is not None:
                self._leave(*found)
            found = backend, answer
            if answer.status != 404:
                break
        if found is None:
            raise APIError(503, "the server that keeps this response does not answer", code="no_backend")
        await self._pass_on(*found)


async def _ended(task: asyncio.Future[T]) -> T | None:
    """What a task that is wanted no more had come to; None where it comes to nothing."""
    task.cancel()
    await asyncio.wait((task,))
    return None if task.cancelled() or task.exception() is not None else task.result()


async def place_of(backend: Backend) -> dict[str, Any] | None:
    """Where a server's connector listens: its `advertise` or `host`, and `port`, which it was started with. Asked
    once. None where it does not answer. Raises ConfigError where it says that nobody can connect to it."""
    if backend.engine_info is None:
        try:
            _, body = await ask_json_bytes(backend.pool, "/server_info", LOOK_SECONDS)
            settings = orjson.loads(body)["settings"]
            connector, options = settings["points"].get("kv_connector"), settings["options"].get("kv_connector", {})
            host = options.get("advertise") or options.get("host") or backend.address.host
            port = None if options.get("port") is None else int(options["port"])
        except (Unreachable, Lost, TimeoutError, ValueError, KeyError, TypeError, AttributeError):
            return None  # or it is another engine's, or loads its model
        backend.engine_info = {"remote_host": host, "remote_port": port, "connector": connector}
    if backend.engine_info["remote_port"] is None:
        raise _nowhere(backend, backend.engine_info["connector"])
    return {name: backend.engine_info[name] for name in ("remote_host", "remote_port")}


def _nowhere(backend: Backend, connector: str | None) -> ConfigError:
    at_work = f"its kv_connector is {connector}, without a port" if connector else "it has no KV connector"
    return ConfigError(
        f"let two servers work on one prompt at once, where {backend.name} is connected to",
        f"{at_work}; in a pool others find what was saved, and nobody pushes or pulls",
        "start it with --kv-connector tcp and --kv-connector.port, or leave --order decode-first and --overlap out",
    )


async def _answer(send: Send, content: Any, status: int = 200) -> None:
    await _send(send, status, [(b"content-type", b"application/json")], dumps(content))


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
