"""What it takes to score pairs of texts: which prompts to pool, and what their results make of each pair. `LLM.score`
and the server call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.embedding import InputProcessor, check_truncation
from engine.types.errors import InvalidRequestError
from engine.types.outputs import RequestOutput
from engine.types.pooling import PoolingParams
from engine_kit.pooled_outputs import ScoringOutput, ScoringRequestOutput
from engine_kit.request_checks import check_task

MAX_PAIR_CHARACTERS = 2**25
"""The most characters that the pairs of one request may have together: a text is read again with each other that it is
paired with."""


class ScorePlan(NamedTuple):
    """Pool the prompts, in any order; then ask for the scores.

    Args:
        prompts: to pool.
        params: one for each of them.
        scores: from the outputs, one for each prompt in order, to one score for each pair.
    """

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


def _for_task(task: str, params: PoolingParams, inputs: InputProcessor) -> PoolingParams:
    check_task(task, inputs.model)
    if not isinstance(params, PoolingParams):
        raise InvalidRequestError(
            f"score with {type(params).__name__}", "these are no pooling params", "pass PoolingParams"
        )
    if params.task not in (None, task):
        raise InvalidRequestError(
            f"{task} with task={params.task!r}", "they contradict each other", "leave the task out, or use encode"
        )
    return msgspec.structs.replace(params, task=task)


def _cut(prompt: Any, most: int) -> Any:
    fields = {"prompt": prompt} if isinstance(prompt, str) else prompt
    fields = fields if isinstance(fields, Mapping) else {"prompt_token_ids": fields}
    return {**fields, "truncate_prompt_tokens": most}


def _apart(inputs: InputProcessor, first: list[Any], second: list[Any], params: PoolingParams) -> ScorePlan:
    """Cosines of embeddings. A text that is paired with all others is embedded once."""
    params = _for_task("embed", params, inputs)
    some = first if len(first) == len(second) else first[:1]

    def scores(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        left = outputs[: len(some)] if len(some) == len(second) else [outputs[0]] * len(second)
        return [
            ScoringRequestOutput(
                f"{a.request_id}_{b.request_id}",
                ScoringOutput(_cosine(a.data, b.data)),
                a.prompt_token_ids + b.prompt_token_ids,
                a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b in zip(left, outputs[len(some) :], strict=True)
        ]

    prompts = [*some, *second]
    return ScorePlan(prompts, [params] * len(prompts), scores)


def _across(
    inputs: InputProcessor, first: list[Any], second: list[Any], params: PoolingParams, most: int | None
) -> ScorePlan:
    """What a cross-encoder says of each pair."""
    params = _for_task("classify", params, inputs)
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
        prompt, second_start = _pair(inputs, a, b, most)
        prompts.append(prompt)
        complete.append(msgspec.structs.replace(params, second_text_start=second_start))

    def scores(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        return [
            ScoringRequestOutput(
                one.request_id, ScoringOutput(float(one.data[0])), one.prompt_token_ids, one.num_cached_tokens
            )
            for one in outputs
        ]

    return ScorePlan(prompts, complete, scores)


def _pair(inputs: InputProcessor, first: Any, second: Any, most: int | None) -> tuple[dict[str, Any], int | None]:
    """Two texts as one prompt, and where the tokens of the second type begin (None: nowhere). With `most` it is cut to
    so many tokens, see `cut_pair`; -1: to what the model takes.

    Raises InvalidRequestError where they are no texts, or the tokenizer knows no pairs.
    """
    for text in (first, second):
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"score a {type(text).__name__}", "a pair that is read as one prompt is two texts", "pass strings"
            )
    tokenizer = inputs.tokenizer
    encode_pair = getattr(tokenizer, "encode_pair", None)
    if encode_pair is None:
        kind = type(tokenizer).__name__
        raise InvalidRequestError("score a pair of texts", f"the tokenizer {kind} knows no pairs", "use another")
    if most is None:
        inputs.check_characters(len(first) + len(second))
    if inputs.model.pooler.lower_case:
        first, second = first.lower(), second.lower()
    try:
        ids, second_start = encode_pair(first, second)
        if most is not None:
            alone = [tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
            most = inputs.max_model_len if most == -1 else most
            ids, second_start = cut_pair(ids, alone[0], alone[1], second_start, most)
    except (UnicodeError, TypeError) as error:
        raise InvalidRequestError("tokenise a pair", f"it is no valid Unicode text: {error}") from error
    return {"prompt_token_ids": ids}, second_start


def cut_pair(
    ids: list[int], first: list[int], second: list[int], second_start: int | None, most: int
) -> tuple[list[int], int | None]:
    """Two texts that are read as one prompt, cut to `most` tokens in all: from the end of the longer one, then of both,
    as Hugging Face's tokenizers do ("longest_first"). What the tokenizer puts around and between them stays.

    Args:
        ids: the whole prompt.
        first, second: the texts alone.
        second_start: where the tokens of the second type begin.

    Raises InvalidRequestError where no token of the texts would be left.
    """
    if len(ids) <= most:
        return ids, second_start
    before = _place(ids, first, 0)
    between = None if before is None else _place(ids, second, before + len(first))
    if before is None or between is None:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={most}",
            "the tokenizer does not put its own tokens around the texts of a pair",
            "leave it out",
        )
    around = len(ids) - len(first) - len(second)
    if most <= around:
        found = f"the tokenizer puts {around} tokens around a pair, and none of it would be left"
        raise InvalidRequestError(f"truncate_prompt_tokens={most}", found, "raise it")
    short, long = sorted((len(first), len(second)))
    if 2 * short <= most - around:
        long = most - around - short
    else:
        short = (most - around) // 2
        long = most - around - short
    kept, kept_second = (long, short) if len(first) > len(second) else (short, long)
    cut = [*ids[:before], *first[:kept], *ids[before + len(first) : between]]
    cut += [*second[:kept_second], *ids[between + len(second) :]]
    return cut, None if second_start is None else second_start - (len(first) - kept)


def _place(ids: list[int], text: list[int], start: int) -> int | None:
    return next((i for i in range(start, len(ids) - len(text) + 1) if ids[i : i + len(text)] == text), None)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else 0.0
