"""`thinking_budget` as users meet it: thoughts end where their budget ends, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.types.errors import InvalidRequestError
from engine.types.params import ThinkingBudget

SETTINGS: dict[str, Any] = {"dtype": "float64", "max_num_seqs": 8, "num_kv_pages": 300, "grammar": "choice"}


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("thinking")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=folder, **SETTINGS) as model:
        yield model


def tokens(llm: LLM, *budgets: ThinkingBudget | None, **more: Any) -> list[list[int]]:
    """Outputs of one batch."""
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True, **more}
    params = [SamplingParams(**fields, thinking_budget=budget) for budget in budgets]
    outputs = llm.generate(["What do you think?"] * len(params), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def unused(free: list[int]) -> list[int]:
    return [token for token in range(10, 60) if token not in free][:2]


def test_thoughts_end_where_the_budget_ends(llm: LLM, folder: Path) -> None:
    (free,) = tokens(llm, None)
    end = unused(free)
    budgets = [
        ThinkingBudget(tokens=5, end=end),
        None,
        ThinkingBudget(tokens=0, end=end),
        ThinkingBudget(tokens=5, end=free[2:4]),  # they ended by themselves
        ThinkingBudget(tokens=5, end=end, begin=free[1:3]),
        ThinkingBudget(tokens=5, end=end, begin=end[:1]),  # they have not begun
        ThinkingBudget(tokens=5, end=free[4:6]),  # they end in the very last moment, and once more
        ThinkingBudget(tokens=100, end=end),
    ]
    found = tokens(llm, *budgets)
    assert found[0][:7] == [*free[:5], *end] and len(found[0]) == 14
    assert found[2][:2] == end
    assert found[1] == found[3] == found[5] == found[7] == free
    assert found[4] == found[0]
    assert found[6][:7] == [*free[:5], *free[4:6]]
    # What follows is what the model writes behind that, alone as in the batch.
    assert [tokens(llm, budget)[0] for budget in budgets] == found
    with LLM(model=folder, **SETTINGS, drafter="ngram", in_flight=1) as drafting:
        assert tokens(drafting, *budgets) == found


def test_before_a_constraint(llm: LLM) -> None:
    (free,) = tokens(llm, None)
    end = unused(free)
    later = StructuredOutputsParams(choice=["yes", "no"], start_after=end)
    (found,) = tokens(llm, ThinkingBudget(tokens=4, end=end), structured_outputs=later)
    assert found[:6] == [*free[:4], *end]
    assert llm.get_tokenizer().decode(found[6:]) in ("yes", "no")


def test_beside_what_forbids_the_end(llm: LLM) -> None:
    """The end comes all the same: forbidding it would leave thoughts without one."""
    (free,) = tokens(llm, None)
    end = unused(free)
    for more in ({"logit_bias": {end[0]: -100.0}}, {"allowed_token_ids": free}, {"temperature": 5.0, "seed": 3}):
        (found,) = tokens(llm, ThinkingBudget(tokens=3, end=end), **more)
        assert found[3:5] == end


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (ThinkingBudget(tokens=-1, end=[1]), "tokens=-1"),
        (ThinkingBudget(tokens=1, end=[]), "end="),
        (ThinkingBudget(tokens=1, end=[1], begin=[-1]), "begin="),
        (ThinkingBudget(tokens=1, end=[10**6]), "vocabulary ends"),
        ({"tokens": 1, "end": [1]}, "no ThinkingBudget"),
    ],
)
def test_what_is_refused(llm: LLM, budget: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tokens(llm, budget)
