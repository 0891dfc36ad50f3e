"""`AsyncLLM`: the engine for asyncio programs, its core in a process of its own. The server stands on it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from engine.config import EngineConfig
from engine.frontend.assemble import assemble_frontend
from engine.frontend.core_process import CoreProcess
from engine.frontend.input_processor import ProcessedRequest
from engine.frontend.launch import launch
from engine.frontend.output_processor import OutputKind
from engine.frontend.prompts import Prompt, TokensPrompt
from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Abort, Add, Call, FromCore, Outputs, Reply
from engine.types.outputs import RequestOutput, StepStats
from engine.types.params import SamplingParams
from engine.types.start import WorkerReady


class RequestStream(AsyncIterator[RequestOutput]):
    """One request's outputs as they come. Iterate it, or await `final`; `close` gives it up.

    Raises (from either) the typed error that ended the request, or EngineDeadError.
    """

    def __init__(self, llm: AsyncLLM, processed: ProcessedRequest) -> None:
        self._llm = llm
        self.processed = processed
        self._queue: asyncio.Queue[RequestOutput | EngineError] = asyncio.Queue()
        self._ended = False

    def put(self, item: RequestOutput | EngineError) -> None:
        """For the engine: the next output, or the error that ends the stream."""
        self._queue.put_nowait(item)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineError):
            self._ended = True
            raise item
        self._ended = item.finished
        if item.error is not None:
            raise item.error
        return item

    async def final(self) -> RequestOutput:
        """The last output. For a stream of kind FINAL, the only one."""
        last: RequestOutput | None = None
        async for output in self:
            last = output
        assert last is not None, "final() was called on a stream that had ended"
        return last

    def close(self) -> None:
        """Abort the request if it has not ended. Idempotent; nothing more comes out of the stream."""
        if not self._ended:
            self._ended = True
            self._llm.abort(self.processed.request_id)


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
    ) -> RequestStream:
        """Queue a request. To be called in the event loop that ran `start`.

        Args:
            prompt: text or token ids.
            params: left unchanged.
            request_id: unique among unfinished requests; None makes one up.
            kind: what its outputs hold.

        Raises:
            InvalidRequestError, PromptTooLongError: at once, before anything is queued.
            EngineDeadError: the core has died.
        """
        if self._death is not None:
            raise self._death
        processed = self._input.process(request_id or uuid.uuid4().hex, prompt, params)
        self._output.add(processed, kind)
        stream = RequestStream(self, processed)
        self._streams[processed.request_id] = stream
        self._input.announce(processed)
        self._core.send(Add(processed.requests))
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """`async for output in llm.generate(...)`: all that came so far, with every news. Leaving the loop aborts."""
        stream = self.submit(prompt, params, request_id)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """A conversation as a prompt, by the model's chat template. Raises InvalidRequestError, TokenizerError."""
        return self._input.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def abort(self, request_id: str) -> None:
        """End a request; an unknown or ended one is passed over. Its stream is not woken: its owner is calling."""
        self._streams.pop(request_id, None)
        if (core_ids := self._output.abort([request_id])) and self._death is None:
            self._core.send(Abort(core_ids))

    async def call(self, method: str) -> Any:
        """Ask the core ("stats", "reset_prefix_cache", "check_integrity"); the answer as plain data.

        Raises EngineError where the core refuses, EngineDeadError where it has died.
        """
        if self._death is not None:
            raise self._death
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._core.send(Call(call_id, method))
        try:
            return await answer
        finally:
            self._calls.pop(call_id, None)

    def shutdown(self) -> None:
        """Stop the core; requests in progress end with EngineDeadError. Idempotent."""
        self._core.shutdown()
        self._end_all(EngineDeadError("a request in progress", "the engine was shut down"))

    def _take(self, message: FromCore) -> None:
        if isinstance(message, Outputs):
            if message.outputs.stats is not None:
                self.last_stats = message.outputs.stats
            outputs, abort_ids = self._output.process(message.outputs.outputs)
            if abort_ids:
                self._core.send(Abort(abort_ids))
            for output in outputs:
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
        self._end_all(error)
        if self._on_death is not None:
            self._on_death(error)

    def _end_all(self, error: EngineError) -> None:
        for stream in self._streams.values():
            stream.put(error)
        self._output.abort(list(self._streams))
        self._streams.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)


def _hand_over(loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], item: Any) -> None:
    """Call `take(item)` in the loop, unless it has closed."""
    with contextlib.suppress(RuntimeError):  # the program has ended; there is nobody to tell
        loop.call_soon_threadsafe(take, item)
