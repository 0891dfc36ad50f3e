"""Offline use: `LLM` for whole batches, `LLMEngine` for those who want to make the steps themselves.

Both run the engine core in the caller's thread, or, with `data_parallel_size`, several cores in processes of their own.
They are to be used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from engine.frontend.assemble import Frontend, assemble_frontend, start_client
from engine.frontend.input_processor import Prompt, as_prompts, with_field
from engine.frontend.launch import Launch, launch
from engine.frontend.request_checks import check_task
from engine.frontend.request_state import OutputKind, RequestState
from engine.interfaces.client import CoreClient
from engine.plugin.loading import brought
from engine.types.errors import EngineDeadError, EngineError, InvalidRequestError
from engine.types.outputs import CompletionOutput, CoreOutputs, RequestOutput, StepStats
from engine.types.params import SamplingDefaults, SamplingParams
from engine.types.pooling import PoolingParams
from engine.types.request import Adapter

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig
    from engine.interfaces.tokenizer import Tokenizer
    from engine.plugin import Registry

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "user", "content": "..."}."""
Prompts = Prompt | Sequence[Prompt]
Sampling = SamplingParams | Sequence[SamplingParams] | None
Pooling = PoolingParams | Sequence[PoolingParams] | None
Timeouts = float | Sequence[float | None] | None
Adapters = Adapter | Sequence[Adapter | None] | None
Bar = bool | Callable[..., Any]
"""Whether to show a progress bar, where `engine_kit` is installed; a callable is used in tqdm's place."""
T = TypeVar("T")
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


class LLM:
    """A model for offline use.

        llm = LLM(model="/models/llama", dtype="bfloat16", max_num_seqs=64)
        for output in llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, max_tokens=32)):
            print(output.outputs[0].text)

    Args:
        model: a folder or a name; None takes the model that an installed package brings.
        **settings: of `engine.EngineConfig`: settings, drivers by point, options as "point.option".

    Raises the launcher's and the workers' errors; see `engine.errors`.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        from engine.config.settings import EngineConfig

        if model is not None:
            settings["model"] = os.fspath(model)
        self.llm_engine = LLMEngine.from_engine_args(EngineConfig(**settings))
        self._counter = 0

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """An `LLM` on an engine that stands already."""
        llm = cls.__new__(cls)
        llm.llm_engine = engine
        llm._counter = 0
        return llm

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        use_tqdm: Bar = True,
        priority: Sequence[int] | None = None,
        timeout: Timeouts = None,
        return_errors: bool = False,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one or several; see `engine.frontend.input_processor.Prompt`.
            sampling_params: for all, or one for each; None means `get_default_sampling_params()`.
            use_tqdm: show a progress bar; a callable is used in tqdm's place.
            priority: one for each prompt; lower values are more urgent. Only where the scheduling policy heeds it.
            timeout: seconds, for all or one for each prompt (None: no limit). A prompt that takes longer, waiting
                included, ends with a RequestTimeoutError.
            return_errors: a prompt that cannot be served, whatever the reason, has an output with finish reason "error"
                and `RequestOutput.error` in its place, and nothing is raised for it.
            lora_request: the adapter, for all or one for each prompt (None: the model alone), see `engine_lora`.

        Returns one output a prompt, in the order of the prompts.

        Raises:
            InvalidRequestError, PromptTooLongError: one of the prompts or parameters; nothing was begun. Not with
                `return_errors`.
            EngineError: the core could not serve a prompt (e.g. KVCacheTooSmallError). The others are finished first;
                the error's attribute `outputs` holds what this method would have returned with `return_errors`.
            EngineDeadError: the core or a worker has died.
            KeyboardInterrupt: Ctrl-C ends all prompts of this call.

            After any of these, but for EngineDeadError, the engine can be used again.
        """
        several = as_prompts(prompts)
        return self._serve(several, sampling_params, use_tqdm, priority, timeout, return_errors, adapter=lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling = None,
        *,
        use_tqdm: Bar = True,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        timeout: Timeouts = None,
        return_errors: bool = False,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
            messages: one conversation, or a list of them.
            sampling_params, use_tqdm: as for `generate`.
            tools: JSON schemas of functions, for templates that show them.
            add_generation_prompt: end the prompt with the beginning of the assistant's turn.
            chat_template: a template, or the name of one of the model's; None takes the model's default.
            chat_template_kwargs: further variables of the template.
            priority, timeout, return_errors, lora_request: as for `generate`, of each conversation.

        Raises:
            TokenizerError: there is no template, or it refuses the messages; as a prompt that cannot be served.
            As `generate`.
        """
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages

        def rendered(conversation: Any) -> Any:
            return self.llm_engine.frontend.inputs.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                template=chat_template,
                variables=chat_template_kwargs,
            )

        given = sampling_params, use_tqdm, priority, timeout, return_errors, rendered
        return self._serve(conversations, *given, adapter=lora_request)

    def beam_search(self, prompts: Prompts, params: Any, *, use_tqdm: Bar = False) -> list[Any]:
        """The most likely continuations: for each prompt the `beam_width` best sequences, best first.

        Each beam is a request of one token a step, whose prompt lies in the prefix cache (as in vLLM); see
        `engine_kit.beam_search` for the search and how it differs from transformers'.

        Args:
            prompts: as for `generate`.
            params: `engine_kit.beam_search.BeamSearchParams`.
            use_tqdm: show a progress bar for each step; a callable is used in tqdm's place.

        Returns: an `engine_kit.beam_search.BeamSearchOutput` a prompt. Raises: as `generate`.
        """
        found: list[Any] = brought("beam_search", "search with LLM.beam_search")(self, prompts, params, use_tqdm)
        return found

    # -- pooling -----------------------------------------------------------------------------------------------------
    def encode(
        self, prompts: Prompts, pooling_params: Pooling = None, *, use_tqdm: Bar = True, pooling_task: str | None = None
    ) -> list[Any]:
        """Pool prompts; `outputs.data` of an `engine_kit.pooled_outputs.PoolingRequestOutput` is a numpy array.

        Args:
            prompts: one or several, as for `generate`.
            pooling_params: for all, or one for each; None means `PoolingParams()`.
            use_tqdm: show a progress bar; a callable is used in tqdm's place.
            pooling_task: "embed", "token_embed", "classify" or "token_classify", for parameters that name no task.

        Raises:
            InvalidRequestError, PromptTooLongError: one of the prompts or parameters, or a task that this model or
                engine does not have; nothing was begun.
            As `generate`, for a prompt that fails later.
        """
        made: Callable[..., list[Any]] = brought("poolings", "pool with LLM.encode")
        return made(self._pooled(prompts, pooling_params, pooling_task, use_tqdm))

    def embed(self, prompts: Prompts, pooling_params: Pooling = None, *, use_tqdm: Bar = True) -> list[Any]:
        """One vector for each prompt, `outputs.embedding` of an `engine_kit.pooled_outputs.EmbeddingRequestOutput`.
        Arguments and errors are those of `encode`."""
        made: Callable[..., list[Any]] = brought("embeddings", "embed with LLM.embed")
        return made(self._pooled(prompts, pooling_params, "embed", use_tqdm, only=True))

    def classify(self, prompts: Prompts, pooling_params: Pooling = None, *, use_tqdm: Bar = True) -> list[Any]:
        """A number for each label, `outputs.probs` of an `engine_kit.pooled_outputs.ClassificationRequestOutput`.
        Arguments and errors are those of `encode`."""
        made: Callable[..., list[Any]] = brought("classifications", "classify with LLM.classify")
        return made(self._pooled(prompts, pooling_params, "classify", use_tqdm, only=True))

    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: Bar = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[Any]:
        """How well pairs of texts fit: for each of `data_2` a score, `outputs.score` of an
        `engine_kit.pooled_outputs.ScoringRequestOutput`.

        A model that embeds embeds both, and the score is the cosine of the two vectors. A model with a classification
        head of one label (a cross-encoder) reads both as one prompt, and the score is what the head says.

        Args:
            data_1: one, or as many as `data_2`. A single one is paired with each of `data_2`.
            data_2: one or several. For a cross-encoder both are texts.
            pooling_params: for all pairs.
            use_tqdm: as for `encode`.
            truncate_prompt_tokens: cut each text to its first so many tokens, those around it counted; for a
                cross-encoder both texts of a pair together, from the end of the longer; -1: to as many as the model
                takes. None: texts that are too long are refused.

        Raises:
            InvalidRequestError: the numbers do not match, the head has several labels, nothing would be left of a text;
                and as `encode`.
        """
        (params,) = _each("pooling params", pooling_params or PoolingParams(), 1)
        first, second, inputs = as_prompts(data_1), as_prompts(data_2), self.llm_engine.frontend.inputs
        plan = brought("scoring", "score with LLM.score")(inputs, first, second, params, truncate_prompt_tokens)
        scores: list[Any] = plan.scores(self._pooled(plan.prompts, plan.params, None, use_tqdm))
        return scores

    def _pooled(
        self, prompts: Any, params: Pooling, task: str | None, use_tqdm: Bar, only: bool = False
    ) -> list[RequestOutput]:
        """Run prompts; `only`: no parameter may name another task."""
        if task is not None:
            check_task(task, self.llm_engine.frontend.inputs.model)
        several = as_prompts(prompts)
        complete = []
        for param in _each("pooling params", params or PoolingParams(), len(several)):
            if not isinstance(param, PoolingParams):
                raise InvalidRequestError(
                    f"pool with {type(param).__name__}", "these are no pooling params", "pass PoolingParams"
                )
            if only and param.task not in (None, task):
                raise InvalidRequestError(
                    f"{task} with task={param.task!r}",
                    "they contradict each other",
                    "leave the task out, or use encode",
                )
            complete.append(msgspec.structs.replace(param, task=task) if param.task is None else param)
        return self._serve(several, complete, use_tqdm)

    # -- the rest ----------------------------------------------------------------------------------------------------
    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer at work."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of `generate` and `chat` where none are passed, as new ones that may be changed.

        They are what the model's generation_config.json says, and the settings `generation_config` and
        `override_generation_config`; the rest is neutral. Parameters that are passed are taken as they are.
        """
        return self.llm_engine.sampling_defaults.sampling_params()

    def shutdown(self) -> None:
        """Stop, and free the model's memory. Idempotent."""
        self.llm_engine.shutdown()

    def _serve(
        self,
        prompts: Sequence[Any],
        params: Sampling | Sequence[PoolingParams],
        use_tqdm: Bar,
        priority: Sequence[int] | None = None,
        timeout: Timeouts = None,
        return_errors: bool = False,
        prompt_of: Callable[[Any], Any] = lambda prompt: prompt,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """See `generate`. Everything is validated before anything is queued. prompt_of: makes the prompt of what stands
        in `prompts`."""
        process = self.llm_engine.frontend.inputs.process
        given: Any = self.get_default_sampling_params() if params is None else params
        each: list[SamplingParams | PoolingParams] = _each("sampling params", given, len(prompts))
        priorities = _each("priorities", 0 if priority is None else priority, len(prompts))
        timeouts = _each("timeouts", timeout, len(prompts))
        adapters = _each("adapters", adapter, len(prompts))
        first, self._counter = self._counter, self._counter + len(prompts)
        several = zip(prompts, each, priorities, timeouts, adapters, strict=True)
        processed: list[RequestState] = []
        refused: list[RequestOutput] | None = [] if return_errors else None
        for index, (prompt, param, urgency, seconds, by) in enumerate(several):
            name = str(first + index)
            try:
                made = with_field(prompt_of(prompt), "adapter", by)
                processed.append(process(name, made, param, None, urgency, seconds))
            except EngineError as error:
                if refused is None or isinstance(error, EngineDeadError):
                    raise
                refused.append(_refused(name, prompt if isinstance(prompt, str) else None, param, error))
        return self.run(processed, use_tqdm, refused)

    def run(
        self, processed: list[RequestState], use_tqdm: Bar = False, refused: list[RequestOutput] | None = None
    ) -> list[RequestOutput]:
        """Serve requests that the input processor has made. Raises as `generate`.

        refused: outputs of those that were refused; they stand in their places, and no request's error is raised.
        """
        engine = self.llm_engine
        results: dict[str, RequestOutput | None] = {request.request_id: None for request in processed}
        remaining = len(results)
        bar = brought("progress_bar") if use_tqdm and remaining else None
        progress = contextlib.nullcontext(lambda output: None) if bar is None else bar(use_tqdm, remaining)
        keep_interrupt = brought("deferred_interrupt") or contextlib.nullcontext
        with keep_interrupt() as interrupt, progress as advance:
            try:
                for request in processed:
                    try:
                        engine.submit(request, OutputKind.FINAL)
                    except EngineError as found:
                        if refused is None or isinstance(found, EngineDeadError):
                            raise
                        refused.append(_refused(request.request_id, request.prompt, request.params, found))
                        remaining -= 1
                    if interrupt is not None:
                        interrupt.check()
                while remaining:
                    for output in engine.step():
                        if output.request_id in results:
                            results[output.request_id] = output
                            remaining -= 1
                            advance(output)
                        else:  # of a request that was added to the engine by hand
                            engine.undelivered.append(output)
                    if interrupt is not None:
                        interrupt.check()
            except BaseException:
                with contextlib.suppress(EngineError):  # a dead core aborts nothing; its death is what is told
                    engine.abort_request(results)
                raise
        outputs = [output for output in results.values() if output is not None]
        if refused is not None:
            return sorted((*outputs, *refused), key=lambda output: int(output.request_id))
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            error = failed[0]
            setattr(error, "outputs", outputs)  # noqa: B010
            error.add_note(f"{len(failed)} of {len(outputs)} prompts failed; `outputs` of this error holds all")
            raise error
        return outputs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        plan = self.llm_engine.plan
        return f"LLM(model={plan.model_name!r})" if plan is not None else "LLM()"


def _refused(
    name: str, prompt: str | None, params: SamplingParams | PoolingParams, error: EngineError
) -> RequestOutput:
    """What stands in the place of a prompt that was not begun."""
    count = params.n if isinstance(params, SamplingParams) else 1
    completions = [CompletionOutput(index, finish_reason="error") for index in range(count)]
    return RequestOutput(name, prompt, [], completions, finished=True, error=error)


def _each(what: str, given: T | Sequence[T], count: int) -> list[T]:
    """One for each of so many prompts, from one for all or from as many. Raises InvalidRequestError."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(
            f"{count} prompts with {len(given)} {what}", "each needs one", "pass one for all, or as many of both"
        )
    return list(given)
