"""The calls of `LLM` that pool: `encode`, `embed`, `classify`, `score`. Names and results are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from engine.frontend.input_processor import InputProcessor
from engine.frontend.pooling_inputs import check_task
from engine.frontend.prompts import Prompt, as_prompts
from engine.types.errors import InvalidRequestError
from engine.types.outputs import RequestOutput
from engine.types.pooled import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
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
                EmbeddingOutput(_data(output).tolist()),
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
                ClassificationOutput(_data(output).tolist()),
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
    ) -> list[ScoringRequestOutput]:
        """How well pairs of texts fit: for each of `data_2` a score, `outputs.score`.

        A model that embeds embeds both, and the score is the cosine of the two vectors. A model with a classification
        head of one label (a cross-encoder) reads both as one prompt, and the score is what the head says.

        Args:
            data_1: one, or as many as `data_2`. A single one is paired with each of `data_2`.
            data_2: one or several. For a cross-encoder both are texts.
            pooling_params: for all pairs.
            use_tqdm: as for `encode`.

        Raises:
            InvalidRequestError: the numbers do not match, the head has several labels; and as `encode`.
        """
        first, second = _pairs(as_prompts(data_1), as_prompts(data_2))
        params = _several(pooling_params, len(second))
        if self._inputs.model.pooler.num_labels:
            return self._score_across(first, second, params, use_tqdm)
        return self._score_apart(first, second, params, use_tqdm)

    def _score_apart(
        self, first: list[Any], second: list[Any], params: list[PoolingParams], use_tqdm: Bar
    ) -> list[ScoringRequestOutput]:
        """Cosines of embeddings. A text that is paired with all others is embedded once."""
        some = first if len(first) == len(second) else first[:1]
        outputs = self._pooled([*some, *second], [*params[: len(some)], *params], "embed", use_tqdm, only=True)
        left = outputs[: len(some)] * (len(second) // len(some) if len(some) < len(second) else 1)
        return [
            ScoringRequestOutput(
                f"{a.request_id}_{b.request_id}",
                ScoringOutput(_cosine(_data(a), _data(b))),
                a.prompt_token_ids + b.prompt_token_ids,
                a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b in zip(left, outputs[len(some) :], strict=True)
        ]

    def _score_across(
        self, first: list[Any], second: list[Any], params: list[PoolingParams], use_tqdm: Bar
    ) -> list[ScoringRequestOutput]:
        """What a cross-encoder says of each pair."""
        inputs = self._inputs
        check_task("classify", inputs.model)
        labels = inputs.model.pooler.num_labels
        if labels != 1:
            raise InvalidRequestError(
                f"score with {inputs.model.architecture}",
                f"its classification head has {labels} labels, a score is one number",
                "use a head of one label, or ask for classify",
            )
        first = first * len(second) if len(first) < len(second) else first
        prompts, complete = [], []
        for a, b, param in zip(first, second, params, strict=True):
            prompt, second_start = inputs.pair(a, b)
            prompts.append(prompt)
            complete.append(msgspec.structs.replace(param, second_text_start=second_start))
        return [
            ScoringRequestOutput(
                output.request_id,
                ScoringOutput(float(_data(output)[0])),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output in self._pooled(prompts, complete, "classify", use_tqdm, only=True)
        ]

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
        output.request_id, PoolingOutput(_data(output)), output.prompt_token_ids, output.num_cached_tokens
    )


def _data(output: RequestOutput) -> np.ndarray:
    assert output.pooled is not None, "a request that pools ends with what was pooled, or with an error"
    return output.pooled


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


def _pairs(first: list[Any], second: list[Any]) -> tuple[list[Any], list[Any]]:
    """Both lists, where they can be paired."""
    if not first or not second or len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"score {len(first)} texts against {len(second)}",
            "they cannot be paired",
            "pass one against one, one against several, or equally many",
        )
    return first, second


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0
