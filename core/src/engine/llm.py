"""`LLMEngine`: an engine whose steps the caller makes. `engine.LLM`, for whole batches of prompts, is a part outside
the core (of ours `engine_kit.llm`).

The engine core runs in the caller's thread, or, with `data_parallel_size`, several cores in processes of their own. It
is to be used by one thread at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import msgspec

from engine.frontend.assemble import Frontend, assemble_frontend, start_client
from engine.frontend.input_processor import Prompt
from engine.frontend.launch import Launch, launch
from engine.frontend.request_state import OutputKind, RequestState
from engine.interfaces.client import CoreClient
from engine.plugin.loading import brought
from engine.types.errors import EngineDeadError
from engine.types.outputs import CoreOutputs, RequestOutput, StepStats
from engine.types.params import SamplingDefaults, SamplingParams
from engine.types.pooling import PoolingParams

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig
    from engine.interfaces.tokenizer import Tokenizer
    from engine.plugin import Registry

MOMENT = 0.1
"""Seconds that a step waits for cores in other processes, before it is looked whether Ctrl-C was pressed."""


class LLMEngine:
    """An engine whose steps the caller makes.

        engine = LLMEngine.from_engine_args(EngineArgs(model="/models/llama"))
        engine.add_request("a", "Hello", SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    Args:
        frontend: tokenizer and processors.
        client: the engine core.
        plan: what the launcher decided; None in tests.

    Attributes:
        undelivered: outputs that the next `step` returns first.
    """

    def __init__(self, frontend: Frontend, client: CoreClient, plan: Launch | None = None) -> None:
        self.frontend = frontend
        self.client = client
        self.plan = plan
        self.undelivered: list[RequestOutput] = []
        self._early: list[CoreOutputs] = []  # news that came while an answer of the core was waited for
        self._closed = False
        self._lifecycle = brought("lifecycle", "start an engine")(frontend.hooks, self)
        self._lifecycle.started(plan)
        self._hears_stats = self._lifecycle.hears_stats

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, registry: Registry | None = None) -> Self:
        """Start an engine with these settings: choose drivers, load the model. Raises the launcher's errors."""
        plan = launch(engine_args, registry)
        # The tokenizer comes first: it is quick to fail, weights take their time.
        frontend = assemble_frontend(plan)
        client = start_client(plan)
        try:
            engine = cls(frontend, client, plan)
        except BaseException:
            client.shutdown()
            raise
        if plan.config.data_parallel_size > 1:
            weakref.finalize(engine, client.shutdown)  # processes end with the engine, with the program, or before
        return engine

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        arrival_time: float | None = None,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, token ids, or a dict with either.
            params: None means `sampling_defaults`. With PoolingParams one output comes, at the end, with `pooled`.
            arrival_time, priority, timeout: see `InputProcessor.process`.
            output_kind: whether `step` tells all so far, only what is new, or only the end.

        Raises as `InputProcessor.process`: nothing was queued.
        """
        self._alive()
        params = self.sampling_defaults.sampling_params() if params is None else params
        process = self.frontend.inputs.process
        self.submit(process(request_id, prompt, params, arrival_time, priority, timeout), output_kind)

    def submit(self, request: RequestState, output_kind: OutputKind) -> None:
        """Queue a request that the input processor has made."""
        self._alive()
        self.frontend.outputs.send(request, output_kind, self.client)

    def step(self) -> list[RequestOutput]:
        """Make one step of the core. Several cores step by themselves: their next news is waited for, a moment at most.

        Returns:
            News of those requests that have any. A request that the core could not serve ends with finish reason
            "error" and `RequestOutput.error`; the others go on.

        Raises EngineDeadError: the core or a worker has died, or the core knows nothing of a request that waits.
        """
        self._alive()
        outputs, self.undelivered = self.undelivered, []
        if not self.has_unfinished_requests() and not self.client.has_work():
            return outputs
        news = self._early.pop(0) if self._early else self.client.receive(MOMENT)
        if self._hears_stats:
            self._lifecycle.look()
        outputs += self.frontend.outputs.process(news.outputs, self.client)
        if not news.outputs and len(self.frontend.outputs) and not self.client.has_work():
            lost = self.frontend.outputs.request_ids()
            death = EngineDeadError("make a step", f"the engine core knows nothing of {len(lost)} unfinished requests")
            self.frontend.outputs.abort(lost, death)
            raise death
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests in whatever state they are; nothing more is heard of them. Unknown ids are passed over."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        core_ids = self.frontend.outputs.abort(ids)
        if core_ids:
            self.client.abort(core_ids)

    def has_unfinished_requests(self) -> bool:
        """True while `step` has more to tell."""
        return len(self.frontend.outputs) > 0 or bool(self.undelivered)

    def stats(self) -> StepStats:
        """The state of the core."""
        return msgspec.convert(self.call("stats"), StepStats)

    def call(self, method: str, *args: Any) -> Any:
        """Ask the core, or all of several, and wait: see `CoreClient.call`.

        Raises EngineError where one refuses, EngineDeadError where the last has died.
        """
        self._alive()
        answer = self.client.call(method, *args)
        while not answer.done():
            if (news := self.client.receive(MOMENT)).outputs:
                self._early.append(news)
        return answer.result()

    @property
    def last_stats(self) -> StepStats | None:
        """The state of the core, as it told last."""
        return self.client.last_stats

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.frontend.outputs)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer at work."""
        return self.frontend.tokenizer

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Of requests that bring no parameters."""
        return self.frontend.inputs.model.sampling

    def shutdown(self) -> None:
        """Stop, and free the model's memory. Idempotent; every other call then raises EngineDeadError."""
        if not self._closed:
            self._closed = True
            self.frontend.outputs.abort(self.frontend.outputs.request_ids())
            try:
                self.client.shutdown()
            finally:
                self._lifecycle.stopping()

    def _alive(self) -> None:
        if self._closed:
            raise EngineDeadError("use an engine", "it was shut down", "make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
