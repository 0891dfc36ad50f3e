"""The calls of `LLM` that pool (`encode`, `embed`, `classify`, `score`), and what it takes to score pairs of texts:
which prompts to pool, and what their results make of each pair. Names and results are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from engine.frontend.input_processor import InputProcessor, check_task
from engine.frontend.prompts import Prompt, as_prompts, check_truncation
from engine.types.errors import InvalidRequestError
from engine.types.outputs import RequestOutput
from engine.types.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

MAX_PAIR_CHARACTERS = 2**25
"""The most characters that the pairs of one request may have together: a text is read again with each other that it is
paired with."""
Bar = bool | Callable[..., Any]
R = TypeVar("R")


class ScorePlan(NamedTuple):
    """Pool the prompts, in any order; then ask for the scores.

    Args:
        task: of every prompt.
        prompts: to pool.
        params: one for each of them.
        scores: from the outputs, one for each prompt in order, to one score for each pair.
    """

    task: str
    prompts: list[Any]
    params: list[PoolingParams]
    scores: Callable[[Sequence[RequestOutput]], list[ScoringRequestOutput]]


def plan_scores(
    inputs: InputProcessor, first: list[Any], second: list[Any], params: PoolingParams, most: int | None = None
) -> ScorePlan:
    """Plan a score for each of `second`, each with its own of `first`, or all with the only one there. With `most` each
    prompt is cut to so many tokens: a text's, or those of both texts of a pair that is read as one; -1: to what fits.

    Raises:
        InvalidRequestError: the numbers do not match, the model pools nothing, its head has several labels, `most` is
            no number of tokens; or, for a cross-encoder, one of the pair is no text.
    """
    check_truncation(most)
    if not first or not second or len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"score {len(first)} texts against {len(second)}",
            "they cannot be paired",
            "pass one against one, one against several, or equally many",
        )
    if inputs.model.pooler.num_labels:
        return _across(inputs, first, second, params, most)
    if most is not None:
        first, second = ([_cut(text, most) for text in texts] for texts in (first, second))
    return _apart(inputs, first, second, params)


def _cut(prompt: Any, most: int) -> Any:
    fields = {"prompt": prompt} if isinstance(prompt, str) else prompt
    fields = fields if isinstance(fields, Mapping) else {"prompt_token_ids": fields}
    return {**fields, "truncate_prompt_tokens": most}


def _apart(inputs: InputProcessor, first: list[Any], second: list[Any], params: PoolingParams) -> ScorePlan:
    """Cosines of embeddings. A text that is paired with all others is embedded once."""
    check_task("embed", inputs.model)
    some = first if len(first) == len(second) else first[:1]

    def scores(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        left = outputs[: len(some)] if len(some) == len(second) else [outputs[0]] * len(second)
        return [
            ScoringRequestOutput(
                f"{a.request_id}_{b.request_id}",
                ScoringOutput(_cosine(data_of(a), data_of(b))),
                a.prompt_token_ids + b.prompt_token_ids,
                a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b in zip(left, outputs[len(some) :], strict=True)
        ]

    prompts = [*some, *second]
    return ScorePlan("embed", prompts, [params] * len(prompts), scores)


def _across(
    inputs: InputProcessor, first: list[Any], second: list[Any], params: PoolingParams, most: int | None
) -> ScorePlan:
    """What a cross-encoder says of each pair."""
    check_task("classify", inputs.model)
    labels = inputs.model.pooler.num_labels
    if labels != 1:
        raise InvalidRequestError(
            f"score with {inputs.model.architecture}",
            f"its classification head has {labels} labels, a score is one number",
            "use a head of one label, or ask for classify",
        )
    prompts, complete = [], []
    pairs = list(zip(first * len(second) if len(first) < len(second) else first, second, strict=True))
    characters = sum(len(text) for pair in pairs for text in pair if isinstance(text, str))
    if characters > MAX_PAIR_CHARACTERS:
        raise InvalidRequestError(
            f"score {len(pairs)} pairs of texts",
            f"they have {characters} characters together; at most {MAX_PAIR_CHARACTERS} are taken",
            "send fewer or shorter ones",
        )
    for a, b in pairs:
        prompt, second_start = inputs.pair(a, b, most)
        prompts.append(prompt)
        complete.append(msgspec.structs.replace(params, second_text_start=second_start))

    def scores(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        return [_result(ScoringRequestOutput, one, ScoringOutput(float(data_of(one)[0]))) for one in outputs]

    return ScorePlan("classify", prompts, complete, scores)


def data_of(output: RequestOutput) -> np.ndarray:
    """What was pooled for a request that ended well."""
    assert output.pooled is not None, "a request that pools ends with what was pooled, or with an error"
    return output.pooled


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0


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
        return [_result(EmbeddingRequestOutput, one, EmbeddingOutput(data_of(one).tolist())) for one in outputs]

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
            _result(ClassificationRequestOutput, one, ClassificationOutput(data_of(one).tolist())) for one in outputs
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
    return _result(PoolingRequestOutput, output, PoolingOutput(data_of(output)))


def _result(kind: Callable[..., R], output: RequestOutput, result: object) -> R:
    return kind(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens)


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
