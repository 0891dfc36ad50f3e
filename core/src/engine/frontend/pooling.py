"""What it takes to score pairs of texts: which prompts to pool, and what their results make of each pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from engine.frontend.input_processor import InputProcessor, check_task
from engine.frontend.prompts import check_truncation
from engine.types.errors import InvalidRequestError
from engine.types.outputs import RequestOutput
from engine.types.pooling import PoolingParams, ScoringOutput, ScoringRequestOutput

MAX_PAIR_CHARACTERS = 2**25
"""The most characters that the pairs of one request may have together: a text is read again with each other that it is
paired with."""
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
        return [pooled_as(ScoringRequestOutput, one, ScoringOutput(float(data_of(one)[0]))) for one in outputs]

    return ScorePlan("classify", prompts, complete, scores)


def data_of(output: RequestOutput) -> np.ndarray:
    """What was pooled for a request that ended well."""
    assert output.pooled is not None, "a request that pools ends with what was pooled, or with an error"
    return output.pooled


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0


def pooled_as(kind: Callable[..., R], output: RequestOutput, result: object) -> R:
    """An output in one of the forms in which callers of `LLM` get it."""
    return kind(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens)
