"""The calls of `LLM` that pool: `encode`, `embed`, `classify`, `score`. Names and results are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.frontend.input_processor import InputProcessor
from engine.frontend.pooling_inputs import check_task
from engine.frontend.prompts import Prompt, as_prompts
from engine.frontend.score_plan import data_of, plan_scores
from engine.types.errors import InvalidRequestError
from engine.types.outputs import RequestOutput
from engine.types.pooled import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from engine.types.pooling import PoolingParams

Bar = bool | Callable[..., Any]


class PoolingCalls:
    """The half of `LLM` that pools. The other half says where requests go."""

    @property
    def _inputs(self) -> InputProcessor:
        raise NotImplementedError

    def _pool(self, prompts: Sequence[Any], params: Sequence[PoolingParams], use_tqdm: Bar) -> list[RequestOutput]:
        """Validate all, run all; one output with `pooled` for each prompt, in order."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool prompts; `outputs.data` is a numpy array.

        Args:
            prompts: one or several, as for `generate`.
            pooling_params: for all, or one for each; None means `PoolingParams()`.
            use_tqdm: show a progress bar; a callable is used in tqdm's place.
            pooling_task: "embed", "token_embed" or "classify", for parameters that name no task.

        Raises:
            InvalidRequestError, PromptTooLongError: one of the prompts or parameters, or a task that this model or
                engine does not have; nothing was begun.
            As `generate`, for a prompt that fails later.
        """
        outputs = self._pooled(prompts, pooling_params, pooling_task, use_tqdm)
        return [pooling_output(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Bar = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, `outputs.embedding`. Arguments and errors are those of `encode`."""
        outputs = self._pooled(prompts, pooling_params, "embed", use_tqdm, only=True)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(data_of(output).tolist()),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Bar = True,
    ) -> list[ClassificationRequestOutput]:
        """A number for each label, `outputs.probs`. Arguments and errors are those of `encode`."""
        outputs = self._pooled(prompts, pooling_params, "classify", use_tqdm, only=True)
        return [
            ClassificationRequestOutput(
                output.request_id,
                ClassificationOutput(data_of(output).tolist()),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: Bar = True,
        truncate_prompt_tokens: int | None = None,
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

        Raises:
            InvalidRequestError: the numbers do not match, the head has several labels, nothing would be left of a text;
                and as `encode`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            params = _several(params, 1)[0]
        plan = plan_scores(self._inputs, as_prompts(data_1), as_prompts(data_2), params, truncate_prompt_tokens)
        return plan.scores(self._pooled(plan.prompts, plan.params, plan.task, use_tqdm, only=True))

    def _pooled(
        self,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: str | None,
        use_tqdm: Bar,
        only: bool = False,
    ) -> list[RequestOutput]:
        """Run prompts; `only`: no parameter may name another task."""
        if task is not None:
            check_task(task, self._inputs.model)
        several = as_prompts(prompts)
        complete = []
        for param in _several(params, len(several)):
            if only and param.task not in (None, task):
                raise InvalidRequestError(
                    f"{task} with task={param.task!r}",
                    "they contradict each other",
                    "leave the task out, or use encode",
                )
            complete.append(msgspec.structs.replace(param, task=task) if param.task is None else param)
        return self._pool(several, complete, use_tqdm)


def pooling_output(output: RequestOutput) -> PoolingRequestOutput:
    """The result of a request that pooled, as `encode` gives it."""
    return PoolingRequestOutput(
        output.request_id, PoolingOutput(data_of(output)), output.prompt_token_ids, output.num_cached_tokens
    )


def _several(params: PoolingParams | Sequence[PoolingParams] | None, count: int) -> list[PoolingParams]:
    several = [PoolingParams()] * count if params is None else params
    if isinstance(several, PoolingParams):
        several = [several] * count
    if not isinstance(several, Sequence) or not all(isinstance(param, PoolingParams) for param in several):
        raise InvalidRequestError(
            f"pool with {type(params).__name__}", "these are no pooling params", "pass PoolingParams"
        )
    if len(several) != count:
        raise InvalidRequestError(
            f"pool with {len(several)} pooling params",
            f"there are {count} prompts",
            "pass one for all, or one for each",
        )
    return list(several)
