"""Sound of any length, window by window of 30 s."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from fastapi import Request

from engine.types.outputs import RequestOutput
from engine.types.params import SamplingParams
from engine_audio.card import KEY
from engine_audio.form import AudioForm
from engine_audio.formats import Segment
from engine_audio.segments import Cut, cut
from engine_audio.whisper import STEP, Whisper
from engine_models.log_mel import RATE, SECONDS, log_mel
from engine_server.middleware import engine_id
from engine_server.state import ServerState, collect

SAMPLES_OF_STEP = round(STEP * RATE)
LONGEST_PROMPT = 8192
"""Characters of a prompt of which more would not be seen in any case."""
LEAST_TIMEOUT = 0.001


class Transcription:
    """One request's.

    With timestamps a window begins where the last complete segment of the one before ended, and the decoder is shown
    what was written before. Without them a sound fits into one window.

    Args:
        task: "transcribe" or "translate".
        sound: float32 [n] at 16 kHz.
        measured: segments say how likely they are.

    Attributes:
        language: the code of the one that is spoken; known from the first segment on.
    """

    def __init__(
        self,
        state: ServerState,
        request: Request,
        form: AudioForm,
        whisper: Whisper,
        task: str,
        sound: np.ndarray,
        measured: bool,
    ) -> None:
        self.language = form.language or ("" if whisper.languages else "en")
        self._state = state
        self._request = request
        self._form = form
        self._whisper = whisper
        self._task = task
        self._sound = sound
        self._measured = measured
        self._timestamps = form.with_segments or len(sound) > SECONDS * RATE
        self._written: list[int] = []
        if form.prompt and (text := form.prompt.strip()):
            ids = state.engine.tokenizer.encode(" " + text[-LONGEST_PROMPT:], False)
            self._written = whisper.text(ids)
        self._asked = 0
        self._began = time.monotonic()

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self._sound) / RATE

    async def segments(self) -> AsyncGenerator[Segment]:
        """As they are written. Raises the EngineError that ends it."""
        place, steps = 0, math.ceil(len(self._sound) / SAMPLES_OF_STEP)
        while place < steps:
            begin = place * SAMPLES_OF_STEP
            window = self._sound[begin : begin + SECONDS * RATE]
            features = await asyncio.to_thread(log_mel, window, self._whisper.bins)
            if not self.language:
                self.language = await self._spoken(features)
            no_speech = await self._no_speech(features) if self._measured else 0.0
            output = await self._write(features)
            completion = output.outputs[0]
            tokens = [token for token in completion.token_ids if token != self._whisper.end]
            left = math.ceil(len(window) / SAMPLES_OF_STEP)
            pieces, done = [Cut(0, left, tokens)], left
            if self._timestamps and tokens:
                pieces, done = cut(tokens, self._whisper.no_timestamps + 1, left)
            likely = (completion.cumulative_logprob or 0.0) / max(1, len(completion.token_ids))
            spoken = [self._decode(piece.tokens) for piece in pieces]
            ratio = _compression("".join(spoken))
            for piece, text in zip(pieces, spoken, strict=True):
                if not text.strip():
                    continue
                self._written += piece.tokens
                yield Segment(
                    seek=2 * place,
                    start=round((place + piece.start) * STEP, 2),
                    end=round((place + piece.end) * STEP, 2),
                    text=text,
                    tokens=piece.tokens,
                    temperature=self._form.temperature or 0.0,
                    avg_logprob=likely,
                    compression_ratio=ratio,
                    no_speech_prob=no_speech,
                )
            place += done

    def _decode(self, tokens: list[int]) -> str:
        return self._state.engine.tokenizer.decode(self._whisper.text(tokens))

    async def _spoken(self, features: np.ndarray) -> str:
        """The likeliest language."""
        codes = {token: code for code, token in self._whisper.languages.items()}
        output = await self._ask(features, [self._whisper.start], max_tokens=1, allowed_token_ids=list(codes))
        return codes[output.outputs[0].token_ids[0]]

    async def _no_speech(self, features: np.ndarray) -> float:
        """How likely it is that nobody speaks: log probabilities are those before tokens are forbidden."""
        if (token := self._whisper.no_speech) is None:
            return 0.0
        first = [self._whisper.start]
        output = await self._ask(features, first, max_tokens=1, allowed_token_ids=[token], logprobs=0)
        return math.exp(output.outputs[0].cumulative_logprob or 0.0)

    async def _write(self, features: np.ndarray) -> RequestOutput:
        longest = self._state.engine.max_model_len
        shown = self._written[-(longest // 2 - 1) :] if self._written else []
        ids = self._whisper.beginning(self.language, self._task, self._timestamps)
        ids = [self._whisper.previous, *shown, *ids] if shown else ids
        return await self._ask(
            features,
            ids,
            temperature=self._form.temperature or 0.0,
            max_tokens=longest - len(ids),
            logprobs=0 if self._measured else None,
            seed=self._form.seed,
            extra_args={KEY: self._whisper.rules_for(self._timestamps)},
        )

    async def _ask(self, features: np.ndarray, ids: list[int], **params: Any) -> RequestOutput:
        form, self._asked = self._form, self._asked + 1
        if form.timeout is not None:  # of the whole
            left = form.timeout - (time.monotonic() - self._began)
            form = form.model_copy(update={"timeout": min(form.timeout, max(left, LEAST_TIMEOUT))})
        prompt: Any = {"encoder_prompt": features, "decoder_prompt": {"prompt_token_ids": ids}}
        several = [SamplingParams(**{"temperature": 0.0, "detokenize": False, **params})]
        identity = f"{engine_id(self._request, 'audio')}-{self._asked}"
        (output,) = await collect(await self._state.submit(self._request, form, [prompt], several, identity))
        return output


def _compression(text: str) -> float:
    """How much a text repeats itself."""
    content = text.encode()
    return len(content) / len(zlib.compress(content)) if content else 0.0
