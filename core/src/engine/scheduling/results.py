"""What a step's result must be.

A worker that returns garbage ends the engine, and never gives a user a wrong answer: so everything is checked before
any of it reaches a request.
"""

from __future__ import annotations

import numpy as np

from engine.types.errors import ContractError, InvalidLogitsError
from engine.types.plan import BROKEN, LogprobRows, PromptLogprobRows, StepPlan, StepResult

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def check_result(plan: StepPlan, result: StepResult, vocab_size: int | None = None) -> int:
    """Refuse what does not fit the plan: another step's result, wrong shapes and types, tokens outside the vocabulary.

    Args:
        vocab_size: of the model; None where it is not known.

    Returns the smallest token, or 0 where none is negative: it tells whether a row is `BROKEN`.

    Raises ContractError: what is wrong with it.
    """
    if (fault := _form_fault(plan, result)) is None:
        tokens = result.tokens
        if vocab_size is not None and _all_below(tokens, vocab_size):
            return 0
        lowest, highest = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if vocab_size is not None and highest >= vocab_size:
            fault = f"token {highest}, where the vocabulary has {vocab_size}"
        elif lowest < 0 and _lacks_token(plan, tokens):
            fault = f"no token for a row that draws one: {tokens!r:.200}"
        else:
            return lowest
    raise ContractError(
        f"the result of step {plan.step_id} with {plan.num_rows} rows",
        f"the worker returned {fault}",
        "choose another executor or platform driver and tell its author",
        point="executor",
    )


def _form_fault(plan: StepPlan, result: StepResult) -> str | None:
    if not isinstance(result, StepResult):
        return f"{result!r:.200}, which is no StepResult"
    if result.step_id != plan.step_id:
        return f"the result of step {result.step_id!r:.50}"
    tokens, drafted = result.tokens, plan.num_drafts is not None
    if not _is_integers(tokens):
        return f"tokens {tokens!r:.200}"
    shape = tokens.shape
    fits = shape[:1] == (plan.num_rows,) and (len(shape) == 1 or (len(shape) == 2 and shape[1] >= 1))
    if not fits or (len(shape) == 2 and shape[1] > 1 and not drafted):
        return f"tokens of shape {shape}"
    if drafted and (fault := _drafts_fault(plan, result)):
        return fault
    if result.logprobs is not None and (fault := _scores_fault(plan, result.logprobs)):
        return f"log probabilities {fault}"
    if result.prompt_logprobs is not None and (fault := _scores_fault(plan, result.prompt_logprobs)):
        return f"prompt log probabilities {fault}"
    return None


def _is_integers(array: object) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind == "i"


def _all_below(tokens: np.ndarray, bound: int) -> bool:
    """Whether all are in [0, bound), by one reduction: read without their sign, negative ones are the largest."""
    return bool(np.maximum.reduce(tokens.view(_UNSIGNED[tokens.itemsize]), axis=None, initial=0) < bound)


def _lacks_token(plan: StepPlan, tokens: np.ndarray) -> bool:
    first = tokens if tokens.ndim == 1 else tokens[:, 0]
    return bool(((first < 0) & (first != BROKEN) & plan.samples).any())


def _drafts_fault(plan: StepPlan, result: StepResult) -> str:
    """Rows give their tokens in order, at most one more than the drafts that were found."""
    assert plan.num_drafts is not None
    found, given = result.num_drafts, result.tokens.reshape(plan.num_rows, -1) >= 0
    if found is None or not _is_integers(found) or found.shape != plan.num_drafts.shape:
        return f"num_drafts {found!r:.200}"
    if np.count_nonzero((found < 0) | (found > plan.num_drafts)):
        return f"num_drafts {found!r:.200} for at most {plan.num_drafts!r:.200}"
    most = np.where(plan.samples, found, given.shape[1])
    later = given[:, 1:]
    if np.count_nonzero(later & (np.arange(later.shape[1]) >= most[:, None])) or np.count_nonzero(
        later > given[:, :-1]
    ):
        return f"tokens {result.tokens!r:.200} for drafts {found!r:.200}"
    return ""


def _scores_fault(plan: StepPlan, scores: LogprobRows | PromptLogprobRows) -> str:
    row, (m, *_) = scores.row, np.shape(scores.row) or (0,)
    shapes = [np.shape(column) for column in (row, scores.chosen, scores.rank, scores.top_ids, scores.top_values)]
    if shapes[0] != (m,) or shapes[1:3] != [(m,), (m,)] or shapes[3] != shapes[4] or shapes[3][:1] != (m,):
        return f"of shapes {shapes}"
    if m and not 0 <= int(np.min(row)) <= int(np.max(row)) < plan.num_rows:
        return f"for rows {row!r:.200}"
    return ""


def broken_logits(request_id: str, num_tokens: int) -> InvalidLogitsError:
    """The error of a request whose logits are not numbers."""
    return InvalidLogitsError(
        f"draw a token for request {request_id!r} after {num_tokens} tokens",
        "the model's logits are not numbers (NaN)",
        "the model cannot compute this input in this dtype, or its weights are damaged: try --dtype float32",
    )
