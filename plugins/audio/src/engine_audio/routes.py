"""`/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from engine.plugin.points import LOGITS_PROCESSOR
from engine_audio import formats
from engine_audio.card import KEY
from engine_audio.decoding import decode
from engine_audio.form import SCHEMA, AudioForm, read_form
from engine_audio.languages import LANGUAGES
from engine_audio.transcribing import Transcription
from engine_audio.whisper import Whisper, whisper_of
from engine_server import stream
from engine_server.bodies import JSON
from engine_server.errors import WITH_BODY, APIError, faults, invalid
from engine_server.middleware import note, request_id
from engine_server.state import ServerState, State

FORM: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": SCHEMA}}},
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {name: {} for name in ("application/json", "text/plain", "text/event-stream")}}
}


class Routes:
    """Both.

    Args:
        max_seconds, max_decoding: see `engine_audio.plugin.AudioOptions`.
    """

    def __init__(self, max_seconds: float, max_decoding: int) -> None:
        self._max_seconds = max_seconds
        self._decoding = asyncio.Semaphore(max_decoding)
        self._whisper: Whisper | None = None

    async def transcriptions(self, request: Request, state: State) -> Response:
        """What is said, in the language in which it is said."""
        return await self._answer(request, state, "transcribe")

    async def translations(self, request: Request, state: State) -> Response:
        """What is said, in English."""
        return await self._answer(request, state, "translate")

    async def _answer(self, request: Request, state: ServerState, task: str) -> Response:
        form, content = await read_form(request)
        state.admit(form.model)
        note(request, cache_salt=form.cache_salt)
        whisper = self._served(state)
        _check_language(form, whisper)
        async with self._decoding:
            sound = await asyncio.to_thread(decode, content, self._max_seconds)
        measured = form.response_format == "verbose_json"
        work = Transcription(state, request, form, whisper, task, sound, measured)
        if form.stream:
            return stream.EventStream(_events(work), (), request_id(request))
        return await stream.until_disconnect(request.receive, _whole(work, form, task))

    def _served(self, state: ServerState) -> Whisper:
        if self._whisper is None:
            plan = state.engine.plan
            whisper = whisper_of(state.engine.tokenizer, plan.model, plan.files.generation_config)
            if whisper is None:
                found = f"{plan.model.architecture} reads no sound as Whisper does; start the server with a Whisper"
                raise APIError(400, found, param="model", code="model_without_sound")
            if not any(KEY in chosen.card.extra_args for chosen in plan.chosen(LOGITS_PROCESSOR)):
                found = "nothing holds the output to Whisper's rules; start the server with --logits-processors whisper"
                raise APIError(400, found, code="no_whisper_rules")
            self._whisper = whisper
        return self._whisper


def _check_language(form: AudioForm, whisper: Whisper) -> None:
    known = whisper.languages or {"en": 0}
    if form.language is not None and form.language not in known:
        few = ", ".join(sorted(known)[:8])
        raise invalid("language", f"the model knows no {form.language[:32]!r}; send a code such as {few}")


async def _whole(work: Transcription, form: AudioForm, task: str) -> Response:
    segments = [segment async for segment in work.segments()]
    match form.response_format:
        case "srt":
            return PlainTextResponse(formats.srt(segments))
        case "vtt":
            return PlainTextResponse(formats.vtt(segments))
        case "text":
            return PlainTextResponse(formats.whole_text(segments) + "\n")
        case "verbose_json":
            language = "en" if task == "translate" else work.language
            name = LANGUAGES[language]
            return JSON(formats.verbose(segments, task, name, work.duration))
    answer: dict[str, Any] = {"text": formats.whole_text(segments)}
    return JSON(answer if task == "translate" else {**answer, "usage": formats.usage(work.duration)})


async def _events(work: Transcription) -> AsyncGenerator[bytes]:
    segments: list[formats.Segment] = []
    async for segment in work.segments():
        text = segment.text if segments else segment.text.lstrip()
        segments.append(segment)
        yield stream.event({"type": "transcript.text.delta", "delta": text})
    yield stream.event({"type": "transcript.text.done", "text": formats.whole_text(segments)}) + stream.DONE


def add(router: APIRouter, max_seconds: float, max_decoding: int) -> None:
    """Add both routes."""
    routes = Routes(max_seconds, max_decoding)
    for path, function in (("transcriptions", routes.transcriptions), ("translations", routes.translations)):
        told = ANSWERS | faults(*WITH_BODY)
        router.post(f"/v1/audio/{path}", responses=told, response_model=None, openapi_extra=FORM)(function)
