"""`AsyncLLM`: the engine for asyncio programs, its cores in processes of their own (entry-point group `engine_parts`).
The server stands on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from engine.embedding import (
    Attached,
    EngineConfig,
    OutputKind,
    Prompt,
    RequestObserver,
    RequestState,
    RequestStream,
    assemble_frontend,
    check_attached,
    launch,
    start_cores,
)
from engine.interfaces.client import CoreState
from engine.plugin.points import REASONING_PARSER, TOOL_PARSER
from engine.types.errors import EngineDeadError, EngineError, ShuttingDownError
from engine.types.hooks import HTTPOrigin
from engine.types.outputs import CoreOutputs, RequestOutput, StepStats
from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams
from engine.types.start import WorkerReady
from engine_kit.lifecycle import LifecycleHooks
from engine_kit.long_prompts import LongPrompts
from engine_kit.pooled_outputs import PoolingRequestOutput, poolings

log = logging.getLogger(__name__)


class AsyncLLM:
    """Takes requests from coroutines of one event loop; its cores (`data_parallel_size`) run in other processes.

    Args:
        config: of the engine. Every setting is resolved here, and the cores' processes begin to load the model.
        attached: to cores that another process has started; None starts them.

    Attributes:
        plan: what the launcher decided.
        inputs: makes requests of what users ask.
        long: `run(work, length)` runs what takes the longer the longer a text is; in a thread where that is long.
        tokenizer, tool_parser, reasoning_parser: at work; of the parsers None where there is none.
        renders_tools: whether the chat template has a place for tools.
        calls_hold_special_tokens: the tool parser finds calls by special tokens, so that a text has to show them.
        thought_marks: the texts before and after the model's thoughts; None where no reasoning parser is at work.
        model_names: all names by which requests may ask for the model; the first, `model_name`, is for people.
        max_model_len: most tokens of one request.
        sampling_defaults: of requests that do not say how they are to be sampled.
        worker: what the workers told when they were ready; None before.

    Raises (here or from `start`) the EngineError that stops the start.
    """

    def __init__(self, config: EngineConfig, attached: Attached | None = None) -> None:
        self.config = config
        self.plan = plan = launch(config) if attached is None else check_attached(launch(config), attached.start)
        self._client = start_cores(plan, attached)
        try:
            front = assemble_frontend(plan)
        except BaseException:
            self._client.shutdown()
            raise
        self.inputs = front.inputs
        self._output = front.outputs
        self.hooks = front.hooks
        self.tokenizer = front.tokenizer
        self.tool_parser = front.tool_parser
        self.reasoning_parser = front.reasoning_parser
        self.renders_tools = front.renders_tools
        calls, thoughts = plan.one(TOOL_PARSER), plan.one(REASONING_PARSER)
        self.calls_hold_special_tokens = calls is not None and calls.card.reads_special_tokens
        self.thought_marks = None if thoughts is None else (thoughts.card.begin, thoughts.card.end)
        self.model_name = plan.model_name
        self.model_names = plan.model_names
        self.max_model_len = plan.max_model_len
        self.sampling_defaults = plan.model.sampling
        self.long = LongPrompts()
        self._calls: set[Future[Any]] = set()
        self._death: EngineError | None = None
        self._on_death: Callable[[EngineError], None] | None = None
        self.worker: WorkerReady | None = None
        tells_stats = attached is None or attached.first
        self._lifecycle = LifecycleHooks(self.hooks, self, tells_stats=tells_stats)
        self._stats_hook: asyncio.Task[None] | None = None

    def observe(self, observer: RequestObserver) -> None:
        """Let it know from now on what becomes of requests. There is one: it takes the place of another."""
        self._output.observer = observer

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended; of other clients of the cores, their sequences."""
        return len(self._output) + self._client.num_others

    @property
    def last_stats(self) -> StepStats | None:
        """What the cores told last, as of one; None before the first step."""
        return self._client.last_stats

    @property
    def cores(self) -> list[CoreState]:
        """The state of each core, by its number among those of all servers; none before they are ready."""
        first = self.plan.start.worker.first_dp_rank
        return [state._replace(dp_rank=first + state.dp_rank) for state in self._client.states()]

    @property
    def queue_length(self) -> int:
        """Sequences (n of each request) beyond those that have a place in the batch, or will get one in the next step,
        as far as the frontend can know; negative where places are free.
        """
        stats = self.last_stats
        places = self.config.max_num_seqs * sum(core.alive for core in self._client.states(look=False))
        if stats is not None and stats.num_waiting:
            places = stats.num_running
        return self._output.num_sequences + self._client.num_others - places

    async def start(self, on_death: Callable[[EngineError], None] | None = None) -> None:
        """Wait until the cores are ready. `on_death` is called in the event loop, once, if the last of them dies."""
        self._on_death = on_death
        self.worker = await asyncio.to_thread(self._client.wait_ready)
        self._client.listen(asyncio.get_running_loop(), self._take_or_die, self._die)
        self._lifecycle.started(self.plan)
        if self._lifecycle.hears_stats:
            self._stats_hook = asyncio.create_task(self._lifecycle.run())

    def forget_cached(self) -> None:
        """Another client of the same cores had them forget their prefix caches: see `RemoteClient.cache_reset`."""
        self._client.cache_reset()

    def alive(self) -> bool:
        """True until every core has died or was shut down."""
        return self._death is None and self._client.alive()

    def answers(self) -> bool:
        """Whether any core lives and is not stopped. A step that takes long is no silence."""
        return self.alive() and any(core.alive and not core.stopped for core in self.cores)

    async def submit_all(
        self,
        several: Iterable[tuple[Prompt, SamplingParams | PoolingParams, str | None]],
        kind: OutputKind = OutputKind.CUMULATIVE,
        priority: int = 0,
        timeout: float | None = None,
        origin: HTTPOrigin | None = None,
    ) -> list[RequestStream]:
        """Validate and tokenise, long prompts in a thread, then send to the cores: all, or none where one is refused.
        To be called in the event loop that ran `start`.

        Args:
            several: (prompt, params, id; None makes one up) of each request.
            kind: what their outputs hold.
            priority, timeout, origin: of each, see `InputProcessor.process`.

        Raises what `InputProcessor.process` and `OutputProcessor.send` raise, and EngineDeadError where every core has
        died.
        """
        self._check_alive()
        requests: list[RequestState] = []
        for prompt, params, name in several:
            request_id, now = name or uuid.uuid4().hex, self.inputs.clock.now()
            info = self.inputs.admit(request_id, params, priority, timeout, origin)
            complete = partial(self.inputs.complete, request_id, prompt, params, now, priority, timeout, info)
            # As messages are encoded anyway, that tells how much there is to check: schemas, ids, arguments of plugins.
            length = max(_length(prompt), len(msgspec.msgpack.encode(params)))
            requests.append(await self.long.run(complete, length))
        streams: list[RequestStream] = []
        try:
            for request in requests:
                self._check_alive()
                request.stream = stream = RequestStream(self.abort, request)
                self._output.send(request, kind, self._client)
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
        priority: int = 0,
        timeout: float | None = None,
    ) -> RequestStream:
        """As `submit_all`, one request."""
        (stream,) = await self.submit_all([(prompt, params, request_id)], kind, priority, timeout)
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
        stream = await self.submit(prompt, params, request_id, OutputKind.CUMULATIVE, priority, timeout)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def encode(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> PoolingRequestOutput:
        """Pool one prompt: its embedding, its tokens' embeddings, or its labels, as `params` (or the model) say.

        It gives what `LLM.encode` does. Cancelling aborts the request. Raises as `submit`, and the error that ended it.
        """
        params = PoolingParams() if params is None else params
        stream = await self.submit(prompt, params, request_id, OutputKind.FINAL, priority, timeout)
        try:
            return poolings([await stream.final()])[0]
        finally:
            stream.close()

    def abort(self, request_id: str, error: EngineError | None = None) -> None:
        """End a request; an unknown or ended one is passed over. Its stream is not woken: its owner is calling.

        Args:
            request_id: as it was submitted.
            error: why, where that is no abort; for metrics and hooks.
        """
        if core_ids := self._output.abort([request_id], error):
            self._client.abort(core_ids)

    def end_all(self, error: EngineError) -> None:
        """End every request in progress with this error; the core goes on."""
        self._client.abort(self._end_all(error))

    async def call(self, method: str, *args: Any) -> Any:
        """Ask every core, see `engine.loop.engine_core.EngineCore.call`. The answer as plain data: statistics as those
        of one core, page maps as a list, the answers of workers as a list.

        Raises EngineError where one refuses, EngineDeadError where the last has died.
        """
        self._check_alive()
        answer = self._client.call(method, *args)
        self._calls.add(answer)
        try:
            return await asyncio.wrap_future(answer)
        finally:
            self._calls.discard(answer)

    def shutdown(self) -> None:
        """Stop the cores; requests in progress end with ShuttingDownError, and so does every later call. Idempotent;
        ends a `start` in progress."""
        self._death = self._death or ShuttingDownError("use an engine", "it was shut down", "make a new one")
        self._client.shutdown()
        self._end_all(ShuttingDownError("a request in progress", "the engine was shut down"))
        if self._stats_hook is not None:
            task, self._stats_hook = self._stats_hook, None
            with contextlib.suppress(RuntimeError):  # its loop has closed, and with it the task has ended
                task.get_loop().call_soon_threadsafe(task.cancel)
        self._lifecycle.stopping()

    def _take_or_die(self, several: Sequence[CoreOutputs]) -> None:
        """News that cannot be taken in would leave requests waiting for ever: then the engine has died."""
        if self._death is not None:
            return
        try:
            if (observer := self._output.observer) is not None:
                for news in several:
                    observer.stepped(news.stats)
            if told := [output for news in several for output in news.outputs]:
                self._output.process(told, self._client)
        except Exception as error:
            log.error("news of the engine core could not be taken in", exc_info=error)
            self._die(EngineDeadError("take in what the engine core computed", f"{type(error).__name__}: {error}"))

    def _die(self, error: EngineError) -> None:
        if self._death is not None:
            return
        self._death = error
        self._end_all(error)
        if self._on_death is not None:
            self._on_death(error)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _end_all(self, error: EngineError) -> list[str]:
        """End every request and call in progress. Returns the core requests to abort."""
        for answer in list(self._calls):
            if not answer.done():
                answer.set_exception(error)
        return self._output.end_all(error)


def _length(prompt: Any) -> int:
    """Roughly, how much there is to tokenise. What is no prompt has no length: it is refused at once."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0
