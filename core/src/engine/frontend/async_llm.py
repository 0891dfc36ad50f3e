"""`AsyncLLM`: the engine for asyncio programs, its core in a process of its own. The server stands on it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.frontend.assemble import assemble_frontend
from engine.frontend.core_process import CoreProcess
from engine.frontend.input_processor import ProcessedRequest
from engine.frontend.launch import Launch, launch
from engine.frontend.measures import Measures
from engine.frontend.output_processor import OutputKind
from engine.frontend.prompts import Prompt, TokensPrompt
from engine.frontend.request_stream import RequestStream
from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Abort, Add, Call, FromCore, Outputs, Reply
from engine.types.outputs import RequestOutput, StepStats
from engine.types.params import SamplingParams
from engine.types.start import WorkerReady

LONG_PROMPT = 16384
"""Characters (or messages, times 256) from which a prompt is tokenised in a thread: below, that takes a few
milliseconds at most, which other streams do not notice."""


class AsyncLLM:
    """Takes requests from coroutines of one event loop; its core runs in another process.

    Args:
        config: of the engine. Every setting is resolved here, and the core's process begins to load the model.

    Raises (here or from `start`) the EngineError that stops the start.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._launch = launch(config)
        self._core = CoreProcess(self._launch.start)
        try:
            front = assemble_frontend(self._launch)
        except BaseException:
            self._core.shutdown()
            raise
        self._input, self._output = front.inputs, front.outputs
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._death: EngineError | None = None
        self._on_death: Callable[[EngineError], None] | None = None
        self.worker: WorkerReady | None = None
        self.last_stats: StepStats | None = None
        self.measures = Measures(self.max_model_len)

    @property
    def tokenizer(self) -> Tokenizer:
        """At work."""
        return self._input.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request."""
        return self._input.max_model_len

    @property
    def model_name(self) -> str:
        """The model's name for people and for the API."""
        return self._launch.model_name

    @property
    def plan(self) -> Launch:
        """What the launcher decided."""
        return self._launch

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._output)

    @property
    def queue_length(self) -> int:
        """Sequences (n of each request) beyond those that have a place in the batch, or will get one in the next step,
        as far as the frontend can know; negative where places are free.
        """
        stats = self.last_stats
        places = self.config.max_num_seqs if stats is None or not stats.num_waiting else stats.num_running
        return self._output.num_sequences - places

    async def start(self, on_death: Callable[[EngineError], None] | None = None) -> None:
        """Wait until the core is ready. `on_death` is called in the event loop, once, if it dies later."""
        self._on_death = on_death
        self.worker = await asyncio.to_thread(self._core.wait_ready)
        loop = asyncio.get_running_loop()
        self._core.listen(
            lambda message: _hand_over(loop, self._take, message), lambda error: _hand_over(loop, self._die, error)
        )

    def alive(self) -> bool:
        """True until the core has died or was shut down."""
        return self._death is None and self._core.alive()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
        priority: int = 0,
        timeout: float | None = None,
    ) -> RequestStream:
        """Queue a request. To be called in the event loop that ran `start`.

        Args:
            prompt: text or token ids.
            params: left unchanged.
            request_id: unique among unfinished requests; None makes one up.
            kind: what its outputs hold.
            priority: lower values are more urgent; other than 0 only where the scheduling policy heeds it.
            timeout: seconds until it ends with a RequestTimeoutError, from its arrival in the core; None for no limit.

        Raises:
            InvalidRequestError, PromptTooLongError: at once, before anything is queued.
            EngineDeadError: the core has died.
        """
        self._check_alive()
        request_id = request_id or uuid.uuid4().hex
        processed = self._input.process(request_id, prompt, params, priority=priority, timeout=timeout)
        return self.enqueue(processed, kind)

    async def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> ProcessedRequest:
        """Validate and tokenise, for `enqueue`: what `submit` does first, but a long prompt does not stop the loop.

        Raises InvalidRequestError, PromptTooLongError.
        """
        request_id, now = request_id or uuid.uuid4().hex, time.time()
        if _length(prompt) < LONG_PROMPT:
            return self._input.process(request_id, prompt, params, now, priority, timeout)
        return await asyncio.to_thread(self._input.process, request_id, prompt, params, now, priority, timeout)

    def enqueue(self, processed: ProcessedRequest, kind: OutputKind = OutputKind.CUMULATIVE) -> RequestStream:
        """Send a processed request to the core. To be called in the event loop that ran `start`.

        Raises InvalidRequestError where its id is in use, EngineDeadError where the core has died.
        """
        self._check_alive()
        self._output.add(processed, kind)
        stream = RequestStream(self.abort, processed, kind)
        self._streams[processed.request_id] = stream
        waited = max(0.0, time.time() - processed.requests[0].arrival_time)
        self.measures.arrived(processed, time.monotonic() - waited)
        self._input.announce(processed)
        self._core.send(Add(processed.requests))
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`async for output in llm.generate(...)`: all that came so far, with every news. Leaving the loop aborts."""
        stream = self.submit(prompt, params, request_id, priority=priority, timeout=timeout)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """A conversation as a prompt, by the model's chat template; a long one in a thread.

        Raises InvalidRequestError, TokenizerError.
        """

        def render() -> TokensPrompt:
            return self._input.render_chat(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
            )

        plain = isinstance(messages, (list, tuple)) and not tools and not variables
        short = plain and sum(map(_message_length, messages)) < LONG_PROMPT
        return render() if short else await asyncio.to_thread(render)

    def abort(self, request_id: str) -> None:
        """End a request; an unknown or ended one is passed over. Its stream is not woken: its owner is calling."""
        self._streams.pop(request_id, None)
        if core_ids := self._output.abort([request_id]):
            now = time.monotonic()
            for core_id in core_ids:
                self.measures.ended(core_id, "abort", now)
            if self._death is None:
                self._core.send(Abort(core_ids))

    def end_all(self, error: EngineError) -> None:
        """End every request in progress with this error; the core goes on."""
        core_ids = self._output.abort(list(self._streams))
        self._end_all(error)
        if core_ids and self._death is None:
            self._core.send(Abort(core_ids))

    async def call(self, method: str) -> Any:
        """Ask the core ("stats", "reset_prefix_cache", "check_integrity"); the answer as plain data.

        Raises EngineError where the core refuses, EngineDeadError where it has died.
        """
        self._check_alive()
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._core.send(Call(call_id, method))
        try:
            return await answer
        finally:
            self._calls.pop(call_id, None)

    def shutdown(self) -> None:
        """Stop the core; requests in progress end with EngineDeadError. Idempotent; also ends a `start` in progress."""
        self._core.shutdown()
        self._end_all(EngineDeadError("a request in progress", "the engine was shut down"))

    def _take(self, message: FromCore) -> None:
        if isinstance(message, Outputs):
            if message.outputs.stats is not None:
                self.last_stats = message.outputs.stats
            now = time.monotonic()
            self.measures.stepped(message.outputs.outputs, message.outputs.stats, now)
            processed = self._output.process(message.outputs.outputs)
            for request_id, reason in processed.ended:
                self.measures.ended(request_id, reason, now)
            if processed.abort_ids:
                self._core.send(Abort(processed.abort_ids))
            for output in processed.outputs:
                name = output.request_id
                stream = self._streams.pop(name, None) if output.finished else self._streams.get(name)
                if stream is not None:
                    stream.put(output)
        elif isinstance(message, Reply) and (answer := self._calls.get(message.call_id)) and not answer.done():
            if message.error:
                answer.set_exception(EngineError("call the engine core", message.error))
            else:
                answer.set_result(message.value)

    def _die(self, error: EngineError) -> None:
        self._death = error
        if self.last_stats is not None:  # nothing runs any more, and nobody will tell
            self.last_stats = msgspec.structs.replace(self.last_stats, num_running=0, num_waiting=0, pages_used=0)
        self._end_all(error)
        if self._on_death is not None:
            self._on_death(error)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _end_all(self, error: EngineError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self.measures.ended_all("error", time.monotonic())
        self._output.abort(list(self._streams))
        self._streams.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)


def _hand_over(loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], item: Any) -> None:
    """Call `take(item)` in the loop, unless it has closed."""
    with contextlib.suppress(RuntimeError):  # the program has ended; there is nobody to tell
        loop.call_soon_threadsafe(take, item)


def _length(prompt: Any) -> int:
    """Roughly, how much there is to tokenise. What is no prompt has no length: it is refused at once."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0


def _message_length(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else None
    return 256 + (len(content) if isinstance(content, str) else LONG_PROMPT if content else 0)
