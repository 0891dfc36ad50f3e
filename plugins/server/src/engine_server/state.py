"""What the routes share: the engine, the names under which its model is served, and the way of requests to it, of
whatever protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, cast

from fastapi import Depends, Request

from engine.embedding import OutputKind, Prompt, RequestStream
from engine.types.hooks import HTTPOrigin
from engine.types.outputs import RequestOutput
from engine.types.params import SamplingDefaults, SamplingParams
from engine.types.pooling import PoolingParams
from engine_kit.async_llm import AsyncLLM
from engine_server.adapters import ServedAdapters
from engine_server.bodies import GeneratingBody, QueuedBody
from engine_server.config import ServerConfig
from engine_server.errors import APIError, invalid, try_again
from engine_server.keys import is_secret
from engine_server.lifecycle import Lifecycle
from engine_server.metrics.gathering import Gathered, Snapshot
from engine_server.responses.store import Background, ResponseShelf

MAX_COMPLETIONS = 4096
"""The most sequences that one HTTP request may ask for."""
QUEUE_RETRY_SECONDS = 1


class Others(Protocol):
    """The API processes beside this one, and itself: what they have together."""

    @property
    def responses(self) -> ResponseShelf: ...
    @property
    def background(self) -> Background: ...

    def counted_by(self, snapshot: Callable[[], Snapshot]) -> None:
        """Take what tells them what this process has counted."""

    async def gather(self) -> Gathered:
        """What all of them have counted."""

    def cache_reset(self) -> None:
        """Let the others know that the cores forgot their prefix caches."""


@dataclass(frozen=True)
class ServerState:
    """What the routes share. Made once, by `create_app`.

    Args:
        adapters: the models beside the model.
        responses: those that are kept.
        background: those that are computed while nobody waits.
        others: the API processes beside this one; None: there are none.
        created: seconds, for `/v1/models`.
        told_apart: variables that change what the chat template writes, or do not, as they were tried.
        preparing: sequences of each HTTP request that is on its way into the queue.
    """

    engine: AsyncLLM
    adapters: ServedAdapters
    lifecycle: Lifecycle
    settings: ServerConfig
    responses: ResponseShelf
    background: Background
    others: Others | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    told_apart: dict[bytes, bool] = field(default_factory=dict)
    preparing: list[int] = field(default_factory=list)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Under which requests may ask for the model, the first being what answers carry, and for its adapters."""
        return self.engine.model_names + self.adapters.names

    def check_model(self, name: str | None) -> str:
        """The name to answer with; None means the first. Raises a 404 APIError for a model that is not served."""
        if name is not None and name not in self.model_names:
            found = f"the model {name[:200]!r} does not exist; this server serves {', '.join(self.model_names)}"
            raise APIError(404, found, param="model", code="model_not_found")
        return self.model_names[0] if name is None else name

    def admit(self, name: str | None) -> str:
        """The name to answer with, for what is to be queued, before any work on it. Raises as `check_model`, and a 429
        APIError where as many sequences wait as may. An engine with a free place takes any request."""
        name = self.check_model(name)
        self._check_queue()
        return name

    @contextmanager
    def entering(self, sequences: int) -> Iterator[None]:
        """While so many sequences are tokenised and queued, which may take a while: by now they count as waiting, so
        that no more come than may. Raises the 429 of `admit`."""
        self._check_queue()
        self.preparing.append(sequences)
        try:
            yield
        finally:
            self.preparing.remove(sequences)

    def _check_queue(self) -> None:
        if (waiting := self.engine.queue_length + sum(self.preparing)) >= self.settings.max_queue:
            found = (
                f"{waiting} sequences wait for a place, and no more than {self.settings.max_queue} may (--max-queue)"
            )
            raise try_again(429, found, QUEUE_RETRY_SECONDS, "queue_full")

    async def generate(
        self, request: Request, body: GeneratingBody, prompts: Sequence[Prompt], params: SamplingParams, identity: str
    ) -> list[RequestStream]:
        """As `submit`, to generate from each prompt alike. Where the body says `stream`, the outputs hold only what is
        new; else one comes at the end. Raises a 400 APIError, too, where the completions are too many."""
        if (completions := len(prompts) * params.num_sequences) > MAX_COMPLETIONS:
            params.verify()  # what it refuses, it refuses in better words
            raise APIError(
                400,
                f"{len(prompts)} prompts of {params.num_sequences} completions each are {completions} completions; "
                f"ask for up to {MAX_COMPLETIONS} in one request",
                param="n",
            )
        if body.kv_transfer_params is not None:
            if len(prompts) > 1:
                raise invalid("kv_transfer_params", f"these are of one prompt, and here are {len(prompts)}; send one")
            prompts = [{**_fields(prompts[0]), "kv_transfer": body.kv_transfer_params}]  # type: ignore[list-item]
        if body.kv_retention is not None:
            wish = body.kv_retention.model_dump(exclude_none=True)
            fields = [_fields(prompt) for prompt in prompts]
            prompts = [{**one, "kv_retention": [wish, *one.get("kv_retention", ())]} for one in fields]  # type: ignore[misc]
        kind = OutputKind.DELTA if body.stream else OutputKind.FINAL
        return await self.submit(request, body, prompts, [params] * len(prompts), identity, kind)

    async def submit(
        self,
        request: Request,
        body: QueuedBody,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        identity: str,
        kind: OutputKind = OutputKind.FINAL,
    ) -> list[RequestStream]:
        """Queue every prompt, or none: one that is refused takes the others back. Hooks are told of the HTTP `request`.

        Raises what `AsyncLLM.submit_all` raises, and a 429 APIError where the queue is full by now.
        """
        told = origin(request) if self.engine.inputs.told_of_requests else None
        names = [identity] if len(prompts) == 1 else [f"{identity}-{i}" for i in range(len(prompts))]
        if added := self.adapters.fields(body.model):
            fields = [_fields(prompt) for prompt in prompts]
            if any(one.keys() & added.keys() for one in fields):
                raise invalid("prompt_embeds", f"{body.model!r} has its own before every prompt; send text")
            prompts = [{**one, **added} for one in fields]  # type: ignore[misc]
        else:
            self.check_model(body.model)  # an adapter may be gone by now
        several = zip(self._salted(prompts, request), params, names, strict=True)
        with self.entering(sum(1 if isinstance(one, PoolingParams) else one.num_sequences for one in params)):
            return await self.engine.submit_all(several, kind, body.priority, body.timeout, told)

    def _salted(self, prompts: Sequence[Prompt], request: Request) -> Sequence[Prompt]:
        """The prompts so that they share no cached pages with those of other API keys, unless they may, and none with
        those of another `cache_salt`. What they retain counts for their API key; without keys it counts for all
        together, because a client may make up as many salts as it likes."""
        noted = request.scope["state"]
        key = noted.get("cache_salt")
        prompts = [_retained_for(key or "", prompt) for prompt in prompts]
        of_key = None if self.settings.share_prefix_cache else key
        salts = [*filter(None, (of_key, noted.get("own_salt")))]
        if not salts:
            return prompts
        several: list[Any] = []
        for prompt in prompts:
            fields = _fields(prompt)
            own = fields.get("cache_salt")
            several.append({**fields, "cache_salt": " ".join(salts if own is None else [*salts, own])})
        return several


def _retained_for(key: str, prompt: Prompt) -> Prompt:
    wishes: Any = prompt.get("kv_retention") if isinstance(prompt, Mapping) else None
    if wishes is None:
        return prompt
    several = [wishes] if isinstance(wishes, Mapping) else wishes
    return {**_fields(prompt), "kv_retention": [{**wish, "key": key} for wish in several]}  # type: ignore[return-value]


def _fields(prompt: Prompt) -> dict[str, Any]:
    """A prompt of any form in its longest one."""
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


async def state_of(request: Request) -> ServerState:
    """The app's state, for `Depends`. A coroutine, or it would run in a thread, for every request."""
    return cast(ServerState, request.app.state.server)


State = Annotated[ServerState, Depends(state_of)]
"""What a route declares to get the server's state."""


_SAMPLING = frozenset(SamplingParams.__struct_fields__) - {"max_tokens", "logprobs", "structured_outputs"}


def sampling_params(
    body: GeneratingBody, defaults: SamplingDefaults, max_tokens: int | None, **more: Any
) -> SamplingParams:
    """The parameters that a body sets, by their own names, and `more`, over the model's. The engine verifies them."""
    given = {name: getattr(body, name) for name in body.model_fields_set & _SAMPLING}
    return SamplingParams(**over_defaults(defaults, {**given, **more}, max_tokens))


def over_defaults(defaults: SamplingDefaults, given: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The keywords of `SamplingParams` for a request.

    Args:
        given: what the request says, without `max_tokens`.
        max_tokens: what it says of that, or the route's own default; None: the model's, and without one what fits.
    """
    if max_tokens is None:
        max_tokens = defaults.params.get("max_tokens")  # type: ignore[assignment]
    # What is no integer is left to be refused by its name.
    if (limit := defaults.max_tokens_limit) is not None and (max_tokens is None or type(max_tokens) is int):
        max_tokens = limit if max_tokens is None else min(max_tokens, limit)
    return {**defaults.params, **given, "max_tokens": max_tokens}


def origin(request: Request) -> HTTPOrigin:
    """What hooks are told of a request that came over HTTP."""
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        if not is_secret(name):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    client = "" if request.client is None else request.client.host
    return HTTPOrigin(method=request.method, path=request.url.path, headers=headers, client=client)


async def collect(streams: list[RequestStream]) -> list[RequestOutput]:
    """Wait for all of them. An error in one, or cancellation, aborts the others."""
    try:
        return [await stream.final() for stream in streams]
    finally:
        for stream in streams:
            stream.close()
