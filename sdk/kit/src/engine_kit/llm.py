"""`LLM`: offline use, whole batches of prompts at once (entry-point group `engine_parts`). It makes the steps of an
`engine.LLMEngine`, in the caller's thread or with cores in processes of their own. To be used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from engine.embedding import EngineConfig, LLMEngine, OutputKind, Prompt, RequestState, as_prompts
from engine.types.errors import EngineDeadError, EngineError, InvalidRequestError
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams
from engine.types.request import Adapter
from engine_kit.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from engine_kit.deferred_interrupt import DeferredInterrupt
from engine_kit.pooled_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classifications,
    embeddings,
    poolings,
)
from engine_kit.progress_bar import progress
from engine_kit.request_checks import check_task
from engine_kit.scoring import plan_scores

if TYPE_CHECKING:
    from engine.interfaces.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "user", "content": "..."}."""
Prompts = Prompt | Sequence[Prompt]
Sampling = SamplingParams | Sequence[SamplingParams] | None
Pooling = PoolingParams | Sequence[PoolingParams] | None
Timeouts = float | Sequence[float | None] | None
Adapters = Adapter | Sequence[Adapter | None] | None
Bar = bool | Callable[..., Any]
"""Whether to show a progress bar; a callable is used in tqdm's place."""
T = TypeVar("T")


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

        def rendered(conversation: Any, adapter: Adapter | None) -> Any:
            return self.llm_engine.frontend.inputs.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                template=chat_template,
                variables=chat_template_kwargs,
                adapter=adapter,
            )

        given = sampling_params, use_tqdm, priority, timeout, return_errors, rendered
        return self._serve(conversations, *given, adapter=lora_request)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, use_tqdm: Bar = False, lora_request: Adapters = None
    ) -> list[BeamSearchOutput]:
        """The most likely continuations: for each prompt the `beam_width` best sequences, best first.

        Each beam is a request of one token a step, whose prompt lies in the prefix cache (as in vLLM); see
        `engine_kit.beam_search` for the search and how it differs from transformers'.

        Args:
            prompts: as for `generate`.
            params: how many beams, how long.
            use_tqdm: show a progress bar for each step; a callable is used in tqdm's place.
            lora_request: as for `generate`.

        Returns: one a prompt. Raises: as `generate`.
        """
        several = as_prompts(prompts)
        adapted = [
            _with_adapter(*one) for one in zip(several, _each("adapters", lora_request, len(several)), strict=True)
        ]
        return beam_search(self.llm_engine.frontend, partial(self.run, use_tqdm=use_tqdm), adapted, params)

    # -- pooling -----------------------------------------------------------------------------------------------------
    def encode(
        self,
        prompts: Prompts,
        pooling_params: Pooling = None,
        *,
        use_tqdm: Bar = True,
        pooling_task: str | None = None,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput]:
        """Pool prompts; `outputs.data` is a numpy array.

        Args:
            prompts: one or several, as for `generate`.
            pooling_params: for all, or one for each; None means `PoolingParams()`.
            use_tqdm: show a progress bar; a callable is used in tqdm's place.
            pooling_task: "embed", "token_embed", "classify" or "token_classify", for parameters that name no task.
            lora_request: as for `generate`.

        Raises:
            InvalidRequestError, PromptTooLongError: one of the prompts or parameters, or a task that this model or
                engine does not have; nothing was begun.
            As `generate`, for a prompt that fails later.
        """
        return poolings(self._pooled(prompts, pooling_params, pooling_task, use_tqdm, lora_request))

    def embed(
        self,
        prompts: Prompts,
        pooling_params: Pooling = None,
        *,
        use_tqdm: Bar = True,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, `outputs.embedding`. Arguments and errors are those of `encode`."""
        return embeddings(self._pooled(prompts, pooling_params, "embed", use_tqdm, lora_request, only=True))

    def classify(
        self,
        prompts: Prompts,
        pooling_params: Pooling = None,
        *,
        use_tqdm: Bar = True,
        lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """A number for each label, `outputs.probs`. Arguments and errors are those of `encode`."""
        return classifications(self._pooled(prompts, pooling_params, "classify", use_tqdm, lora_request, only=True))

    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: Bar = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapter | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well pairs of texts fit: for each of `data_2` a score, `outputs.score`.

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
            lora_request: the adapter, for all texts.

        Raises:
            InvalidRequestError: the numbers do not match, the head has several labels, nothing would be left of a text;
                and as `encode`.
        """
        (params,) = _each("pooling params", pooling_params or PoolingParams(), 1)
        first, second, inputs = as_prompts(data_1), as_prompts(data_2), self.llm_engine.frontend.inputs
        plan = plan_scores(inputs, first, second, params, truncate_prompt_tokens)
        return plan.scores(self._pooled(plan.prompts, plan.params, None, use_tqdm, lora_request))

    def _pooled(
        self, prompts: Any, params: Pooling, task: str | None, use_tqdm: Bar, adapter: Adapters, only: bool = False
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
        return self._serve(several, complete, use_tqdm, adapter=adapter)

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
        prompt_of: Callable[[Any, Adapter | None], Any] = lambda prompt, adapter: prompt,
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
                made = _with_adapter(prompt_of(prompt, by), by)
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
        bar = progress(use_tqdm, remaining) if use_tqdm and remaining else contextlib.nullcontext(lambda output: None)
        with DeferredInterrupt() as interrupt, bar as advance:
            try:
                for request in processed:
                    try:
                        engine.submit(request, OutputKind.FINAL)
                    except EngineError as found:
                        if refused is None or isinstance(found, EngineDeadError):
                            raise
                        refused.append(_refused(request.request_id, request.prompt, request.params, found))
                        remaining -= 1
                    interrupt.check()
                while remaining:
                    for output in engine.step():
                        if output.request_id in results:
                            results[output.request_id] = output
                            remaining -= 1
                            advance(output)
                        else:  # of a request that was added to the engine by hand
                            engine.undelivered.append(output)
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


def _with_adapter(prompt: Any, adapter: Adapter | None) -> Any:
    """A prompt of any form with an adapter; as it is where there is none."""
    form = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    given = prompt if isinstance(prompt, Mapping) else {form: prompt}
    return prompt if adapter is None else {**given, "adapter": adapter}
