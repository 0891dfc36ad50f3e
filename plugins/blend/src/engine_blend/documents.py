"""Chunks that a request names: `documents` of completions and conversations, and `set_apart` for `LLM`.

A named document is put between separators where it stands in the prompt: in what the chat template makes of the
template's own variable `documents`, in a message, or in the text of a completion. From there on it is a chunk as any
other (`engine_blend.chunks`).

Over HTTP a middleware takes the names from the body, and leaves the rest of it to the server; the hook that rewrites
prompts has them by a header that the middleware sets.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from engine.plugin import hookimpl
from engine.types.errors import RequestRefusedError
from engine.types.hooks import RequestInfo
from engine_blend.card import CacheBlendOptions

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_HEADER = "x-engine-documents"
_FIELD = "documents"
_PATHS = ("/v1/chat/completions", "/v1/completions")
_REMEDY = f"send {_FIELD} as texts, or as objects with a text, that stand in the prompt"


def set_apart(prompt: str, documents: Iterable[str], separator: str = CacheBlendOptions().separator) -> str:
    """The prompt with a separator before and behind each place where one of these texts stands, unless one is there.

    Of texts that overlap the longer one counts. Raises ValueError for an empty text, and for one that does not stand
    in the prompt, neither as it is nor as JSON writes it.
    """
    forms: set[str] = set()
    for number, document in enumerate(documents):
        text = document.strip()  # templates trim
        if not text:
            raise ValueError(f"document {number} is empty")
        there = {form for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]) if form in prompt}
        if not there:
            raise ValueError(f"document {number} ({text[:60]!r}) does not stand in the prompt")
        forms |= there
    if not forms:
        return prompt
    made, end = "", 0
    for found in re.finditer("|".join(map(re.escape, sorted(forms, key=len, reverse=True))), prompt):
        made += prompt[end : found.start()]
        made += found[0] if made.endswith(separator) else separator + found[0]
        end = found.end()
        made += "" if prompt.startswith(separator, end) else separator
    return made + prompt[end:]


class Named(NamedTuple):
    """What a request names. fault: why it cannot be taken; "" where it can."""

    texts: Sequence[str]
    fault: str = ""


class Documents:
    """The hooks. With another evictor at work they do nothing."""

    def __init__(self) -> None:
        self._named: dict[str, Named] = {}
        self._keys = itertools.count()
        self._separator = ""

    @hookimpl(trylast=True)  # innermost: behind what asks for keys
    def http_middleware(self, app: Application, server: Any) -> Application | None:
        """Takes the names from bodies."""
        for choice in server.llm.plan.start.worker.choices:
            if choice.point == "evictor" and choice.driver == "cacheblend":
                self._separator = CacheBlendOptions(**choice.options).separator
                return self._around(app)
        return app

    @hookimpl
    def admit(self, request: RequestInfo) -> None:
        """Refuse what names no documents."""
        named = self._of(request)
        if named is not None and named.fault:
            raise RequestRefusedError(_FIELD, named.fault, _REMEDY, status=400)

    @hookimpl(trylast=True)
    def rewrite_prompt(self, prompt: str, request: RequestInfo) -> str | None:
        """Separators around what the request names."""
        if (named := self._of(request)) is None:
            return None
        try:
            return set_apart(prompt, named.texts, self._separator)
        except ValueError as error:
            raise RequestRefusedError(_FIELD, str(error), _REMEDY, status=400) from error

    def _of(self, request: RequestInfo) -> Named | None:
        return None if request.http is None else self._named.get(request.http.headers.get(_HEADER, ""))

    def _around(self, app: Application) -> Application:
        async def layer(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
                return await app(scope, receive, send)
            first = await receive()  # all of the body, as the server promises
            body: bytes = first.get("body", b"")
            own: dict[bytes, bytes] = {_HEADER.encode(): b""}  # a client has no such header
            key = f"{next(self._keys)}"
            if f'"{_FIELD}"'.encode() in body and (taken := await asyncio.to_thread(_taken, body)) is not None:
                body, self._named[key] = taken
                first = {**first, "body": body}
                own = {_HEADER.encode(): key.encode(), b"content-length": str(len(body)).encode()}
            others = [entry for entry in scope["headers"] if entry[0].lower() not in own]
            scope["headers"] = [*others, *(entry for entry in own.items() if entry[1])]
            messages = iter([first])

            async def again() -> Message:
                return next(messages, None) or await receive()

            try:
                await app(scope, again, send)
            finally:
                self._named.pop(key, None)

        return layer


def _taken(body: bytes) -> tuple[bytes, Named] | None:
    """A body as the server is to read it, and what it names; None where it names nothing, or is none."""
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    documents = fields.pop(_FIELD, None) if isinstance(fields, dict) else None
    if documents is None:
        return None
    named, prompt = _named(documents), fields.get("prompt", "")
    if not all(isinstance(one, str) for one in (prompt if isinstance(prompt, list) else [prompt])):
        named = named if named.fault else Named([], "the prompt is made of token ids, in which no text is looked for")
    if "messages" in fields and not named.fault:
        said = "\0".join(_texts(fields["messages"]))
        rest = [
            document if isinstance(document, dict) else {"title": "", "text": document}
            for document, text in zip(documents, named.texts, strict=True)
            if text.strip() not in said
        ]
        if rest:
            fields[_FIELD] = rest  # the template shows these, or the server says that it does not
    return json.dumps(fields).encode(), named


def _named(documents: Any) -> Named:
    """Each one's text: of an object its `text`, or else its longest."""
    if not isinstance(documents, list):
        return Named([], "it is no list")
    texts = []
    for number, document in enumerate(documents):
        text = document
        if isinstance(document, Mapping):
            values = [value for value in document.values() if isinstance(value, str)]
            text = document.get("text", max(values, key=len, default=None))
        if not isinstance(text, str) or not text.strip():
            return Named([], f"document {number} has no text")
        texts.append(text)
    return Named(texts)


def _texts(messages: Any) -> Iterable[str]:
    """What messages say, as far as they are any."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text
