"""How users call `LLM`, with types: mypy reads this file (pyproject.toml names it), and pytest runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

from engine.frontend.input_processor import Prompt, TokensPrompt
from engine.types.outputs import RequestOutput
from engine.types.params import SamplingParams
from engine_kit.llm import LLM

PARAMS = SamplingParams(max_tokens=1)
HI = {"role": "user", "content": "Hi"}


def test_one_prompt_or_several(doubles: Any, make_llm: Callable[[Any], LLM]) -> None:
    llm = make_llm(doubles.ScriptedCore())
    tokens: TokensPrompt = {"prompt_token_ids": [65, 66]}

    assert_type(llm.generate("a", PARAMS, use_tqdm=False), list[RequestOutput])
    assert_type(llm.generate([65, 66], use_tqdm=False), list[RequestOutput])
    assert_type(llm.generate(tokens, PARAMS, use_tqdm=False), list[RequestOutput])
    assert_type(llm.generate({"prompt": "a"}, PARAMS, use_tqdm=False), list[RequestOutput])
    assert_type(llm.generate(["a", "b"], PARAMS, use_tqdm=False), list[RequestOutput])
    several: list[Prompt] = [tokens, [65], "b"]
    assert_type(llm.generate(several, [PARAMS] * 3, use_tqdm=False), list[RequestOutput])
    assert len(llm.generate([[65], [66]], [PARAMS, PARAMS], use_tqdm=False)) == 2


def test_one_conversation_or_several(doubles: Any, make_llm: Callable[[Any], LLM]) -> None:
    llm = make_llm(doubles.ScriptedCore())

    assert_type(llm.chat([HI], PARAMS, use_tqdm=False), list[RequestOutput])
    assert_type(llm.chat([[HI], [HI]], PARAMS, use_tqdm=False), list[RequestOutput])
    assert len(llm.chat([[HI], [HI]], [PARAMS, PARAMS], use_tqdm=False)) == 2


def refused(llm: LLM) -> None:
    """What a type checker refuses: mypy warns here if it does not (never called)."""
    llm.generate(3)  # type: ignore[arg-type]
    llm.generate("a", {"max_tokens": 1})  # type: ignore[arg-type]
    llm.chat("Hi")  # type: ignore[arg-type]
