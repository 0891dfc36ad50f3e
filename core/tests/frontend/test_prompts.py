"""The forms of a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.frontend.input_processor import ParsedPrompt, as_prompts, parse_prompt
from engine.types.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ParsedPrompt("a", None, None)),
        ({"prompt": "a"}, ParsedPrompt("a", None, None)),
        ({"prompt": "a", "cache_salt": "s"}, ParsedPrompt("a", None, "s")),
        ({"prompt_token_ids": [1, 2]}, ParsedPrompt(None, [1, 2], None)),
        ({"prompt_token_ids": (1, 2), "prompt": "a"}, ParsedPrompt("a", [1, 2], None)),
        ({"prompt_token_ids": np.array([1, 2])}, ParsedPrompt(None, [1, 2], None)),
        ({"prompt_token_ids": [np.int64(3)]}, ParsedPrompt(None, [3], None)),
        ([1, 2], ParsedPrompt(None, [1, 2], None)),
    ],
)
def test_forms(prompt: Any, expected: ParsedPrompt) -> None:
    parsed = parse_prompt(prompt)
    assert parsed == expected
    assert parsed.token_ids is None or all(type(token) is int for token in parsed.token_ids)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3,
        b"a",
        {},
        {"text": "a"},
        {"prompt": 3},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [1.0]},
        {"prompt_token_ids": [None]},
        {"prompt": "a", "cache_salt": 1},
        [True],
        ["a"],
        object(),
    ],
)
def test_bad_forms(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        parse_prompt(prompt)


def test_one_or_several() -> None:
    assert as_prompts("a") == ["a"]
    assert as_prompts(["a", "b"]) == ["a", "b"]
    assert as_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts([[1, 2], "a", {"prompt_token_ids": [3]}]) == [[1, 2], "a", {"prompt_token_ids": [3]}]
    assert as_prompts(np.array([1, 2])) == [[1, 2]]
    assert as_prompts(np.array([[1], [2]])) == [[1], [2]]
    assert as_prompts([]) == []
    for bad in (None, 3, b"ab"):
        with pytest.raises(InvalidRequestError):
            as_prompts(bad)
