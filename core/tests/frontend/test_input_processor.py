"""Requests as the core gets them: validated, tokenised, every default filled in."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest

from engine.frontend.assemble import InProcessClient
from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_state import OutputKind
from engine.types.errors import InvalidRequestError, PromptTooLongError
from engine.types.params import MAX_SEED, SamplingParams
from engine.types.retention import KVRetention


@pytest.fixture
def inputs(doubles: ModuleType) -> InputProcessor:
    return InputProcessor(doubles.CharTokenizer(), doubles.description(), max_model_len=16, seed=7)


def test_text_and_ids(inputs: InputProcessor) -> None:
    text = inputs.process("a", "hi", SamplingParams())
    assert (text.prompt, text.prompt_token_ids) == ("hi", [2, 104, 105])
    ids = inputs.process("b", {"prompt_token_ids": [5, 6], "cache_salt": "s"}, SamplingParams())
    assert (ids.prompt, ids.prompt_token_ids) == (None, [5, 6])
    (request,) = ids.requests
    assert (request.request_id, request.parent, request.cache_salt) == ("b", None, "s")
    assert request.eos_token_ids == [0]  # the tokenizer's second id lies outside the vocabulary


def test_what_cannot_fit_is_refused_before_it_is_tokenised(doubles: ModuleType) -> None:
    tokenised: list[int] = []

    class Tokenizer(doubles.CharTokenizer):  # type: ignore[name-defined, misc]
        longest_token = 3  # so that 48 characters may be 16 tokens, as far as anybody knows

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            tokenised.append(len(text))
            return [5] * (len(text) // 3)

        def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
            return self.encode(first + second), None

    inputs = InputProcessor(Tokenizer(), doubles.description(), max_model_len=16)
    for ask in (
        lambda text: inputs.process("a", text, SamplingParams()),
        lambda text: inputs.process("a", {"prompt": text, "add_special_tokens": False}, SamplingParams()),
        inputs.tokenize,
        lambda text: inputs.check_characters(len(text)),
    ):
        with pytest.raises(PromptTooLongError, match="a prompt of 49 characters; .*16 tokens.* 3 characters"):
            ask("a" * 49)
        assert tokenised == []
    assert inputs.tokenize("a" * 48) == [5] * 16
    cut = inputs.process("b", {"prompt": "a" * 900, "truncate_prompt_tokens": 4}, SamplingParams(max_tokens=2))
    assert cut.prompt_token_ids == [5] * 4


@pytest.mark.parametrize(
    ("most", "max_tokens", "kept"),
    [
        (3, 4, "hij"),
        (11, 4, "\x02abcdefghij"),
        (100, 4, "\x02abcdefghij"),
        (-1, 12, "ghij"),
        (-1, None, "\x02abcdefghij"),
    ],
)
def test_prompts_that_are_cut(inputs: InputProcessor, most: int, max_tokens: int | None, kept: str) -> None:
    """The end stays: it is gone on from."""
    for prompt in ({"prompt": "abcdefghij"}, {"prompt_token_ids": [2, *map(ord, "abcdefghij")]}):
        cut = {**prompt, "truncate_prompt_tokens": most}
        processed = inputs.process("a", cut, SamplingParams(max_tokens=max_tokens))
        assert processed.prompt_token_ids == [ord(c) for c in kept] == processed.requests[0].prompt_token_ids
        assert processed.prompt is None, "its text would not be what was computed"
    long = {"prompt": "x" * 50, "truncate_prompt_tokens": -1}
    assert len(inputs.process("b", long, SamplingParams(max_tokens=None)).prompt_token_ids) == 15


@pytest.mark.parametrize("most", [0, -2, 1.0, True, "3"])
def test_lengths_that_are_none(inputs: InputProcessor, most: Any) -> None:
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
        inputs.process("a", {"prompt": "a", "truncate_prompt_tokens": most}, SamplingParams())


def test_defaults_are_filled_in(inputs: InputProcessor) -> None:
    params = SamplingParams(max_tokens=None, top_k=5000, logprobs=64, min_tokens=3)
    (request,) = inputs.process("a", "hello", params, arrival_time=4.5).requests
    assert request.params.max_tokens == 10
    assert request.params.top_k == 0
    assert request.arrival_time == 4.5
    assert isinstance(request.params.seed, int) and 0 <= request.params.seed <= MAX_SEED
    assert params.max_tokens is None and params.seed is None  # the user's stays as it was
    request.params.verify()
    (request,) = inputs.process("b", "x" * 14, SamplingParams(max_tokens=50, min_tokens=20)).requests
    assert (request.params.max_tokens, request.params.min_tokens) == (1, 1)
    request.params.verify()


def test_seeds_come_from_the_engines_generator(doubles: ModuleType) -> None:
    def seeds(seed: int) -> list[int | None]:
        inputs = InputProcessor(doubles.CharTokenizer(), doubles.description(), 16, seed)
        return [inputs.process(str(i), "a", SamplingParams()).requests[0].params.seed for i in range(4)]

    assert seeds(1) == seeds(1)
    assert seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 4


def test_n_makes_siblings(inputs: InputProcessor) -> None:
    processed = inputs.process("a", "hi", SamplingParams(n=3, seed=MAX_SEED))
    assert [r.request_id for r in processed.requests] == ["a#0", "a#1", "a#2"]
    assert {r.parent for r in processed.requests} == {"a"}
    assert [r.params.seed for r in processed.requests] == [MAX_SEED, 0, 1]
    assert {r.params.n for r in processed.requests} == {1}
    assert processed.params.n == 3
    assert inputs.process("b", "hi", SamplingParams(seed=-1)).requests[0].params.seed == MAX_SEED


def test_lengths(inputs: InputProcessor) -> None:
    inputs.process("a", "x" * 14, SamplingParams())
    with pytest.raises(PromptTooLongError, match=r"16 tokens; the longest request has 16 tokens.*shorten .* to 15"):
        inputs.process("a", "x" * 15, SamplingParams())
    with pytest.raises(PromptTooLongError):
        inputs.process("a", {"prompt_token_ids": [1] * 1000}, SamplingParams())


@pytest.mark.parametrize(
    ("prompt", "params", "complaint"),
    [
        ("", {}, "empty prompt"),
        ({"prompt_token_ids": []}, {}, "empty prompt"),
        ({"prompt_token_ids": [1000]}, {}, "id 1000, the model's vocabulary ends at 999"),
        ({"prompt_token_ids": [-1]}, {}, "id -1"),
        ("Ж", {}, "tokenizer gives the id 1046"),
        ("\ud800", {}, "no valid Unicode"),
        ("a", {"temperature": math.nan}, "temperature=nan"),
        ("a", {"max_tokens": -1}, "max_tokens=-1"),
        ("a", {"stop_token_ids": [1000]}, r"stop_token_ids=\[1000\]"),
        ("a", {"n": 0}, "n=0"),
        ("a", {"stop": [""]}, "empty stop string"),
        (None, {}, "no prompt"),
    ],
)
def test_refusals(inputs: InputProcessor, prompt: Any, params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        inputs.process("a", prompt, SamplingParams(**params))


def test_refuses_bad_ids_and_params(inputs: InputProcessor) -> None:
    for request_id in ("", None, 3):
        with pytest.raises(InvalidRequestError, match="request_id"):
            inputs.process(request_id, "a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="are a dict"):
        inputs.process("a", "a", {"n": 1})  # type: ignore[arg-type]


def test_eos_of_model_and_tokenizer(doubles: ModuleType) -> None:
    inputs = InputProcessor(doubles.CharTokenizer(), doubles.description(eos_token_ids=(7, 0, 1001)), 16)
    assert inputs.process("a", "a", SamplingParams()).requests[0].eos_token_ids == [7, 0]


def test_hook_hears_each_request(doubles: ModuleType) -> None:
    heard: list[str] = []

    class Hooks:
        admit = rewrite_prompt = output_filter = request_finished = None

        @staticmethod
        def request_received(request: Any) -> None:
            heard.append(request.request_id)

    hooks, tokenizer = Hooks(), doubles.CharTokenizer()
    inputs = InputProcessor(tokenizer, doubles.description(), 16, 0, hooks)  # type: ignore[arg-type]
    processed = inputs.process("a", "a", SamplingParams(n=2))
    assert heard == []
    core = doubles.ScriptedCore()
    outputs = OutputProcessor(tokenizer, hooks)  # type: ignore[arg-type]
    outputs.send(processed, OutputKind.FINAL, InProcessClient(core))
    assert heard == ["a#0", "a#1"] and len(core.requests) == 2


def test_chat(inputs: InputProcessor) -> None:
    prompt = inputs.render_chat([{"role": "u", "content": "a"}])
    processed = inputs.process("chat", prompt, SamplingParams())
    assert processed.prompt == "u:a;!"
    assert processed.prompt_token_ids == [ord(c) for c in "u:a;!"]  # no BOS: it is the template's


def test_a_conversations_own_template_and_variables_go_first(doubles: ModuleType) -> None:
    class Tells(doubles.CharTokenizer):  # type: ignore[misc, name-defined]
        def render_chat(self, messages: Any, **options: Any) -> str:
            return f"{options['template']} {options['variables']}"

    given: Any = {"chat_template": "T", "chat_variables": {"a": 1, "b": 2}}
    inputs = InputProcessor(Tells(), doubles.description(), 16, **given)
    said = [{"role": "u", "content": "a"}]
    assert inputs.render_chat(said)["prompt"] == "T {'a': 1, 'b': 2}"
    assert inputs.render_chat(said, template="U", variables={"b": 3})["prompt"] == "U {'a': 1, 'b': 3}"


def test_hooks_decide_before_anything_is_tokenised(doubles: ModuleType) -> None:
    asked: list[Any] = []

    class Hooks:
        output_filter = request_received = request_finished = None

        @staticmethod
        def admit(request: Any) -> None:
            asked.append((request.request_id, request.priority, request.http))

        @staticmethod
        def rewrite_prompt(prompt: str, request: Any) -> str:
            asked.append(prompt)
            return prompt.upper()

    inputs = InputProcessor(doubles.CharTokenizer(), doubles.description(), 16, 0, Hooks())  # type: ignore[arg-type]
    processed = inputs.process("a", "xy", SamplingParams(n=2))
    assert asked == [("a", 0, None), "xy"]
    assert processed.prompt == "XY" and processed.prompt_token_ids[-2:] == [ord("X"), ord("Y")]
    assert processed.info is not None and processed.info.params.n == 2
    asked.clear()
    assert inputs.process("b", [7, 8], SamplingParams()).prompt_token_ids == [7, 8]
    assert asked == [("b", 0, None)]
    asked.clear()
    for prompt, params in (("x", SamplingParams(temperature=-1.0)), ("x", "params")):
        with pytest.raises(InvalidRequestError):
            inputs.process("c", prompt, params)  # type: ignore[arg-type]
    assert asked == []  # what makes no sense is nobody's to admit


def test_what_becomes_of_the_cache(inputs: InputProcessor) -> None:
    """One wish or several; each of n samples has them."""
    prompt = {"prompt": "hi", "kv_retention": {"ttl": 60, "priority": 3}}
    for request in inputs.process("a", prompt, SamplingParams(n=2)).requests:
        assert request.kv_retention == (KVRetention(ttl=60, priority=3),)
    several = [{"tokens": 2, "pin": True}, KVRetention(ttl=1)]
    (request,) = inputs.process("b", {"prompt": "hi", "kv_retention": several}, SamplingParams()).requests
    assert request.kv_retention == (KVRetention(tokens=2, pin=True), KVRetention(ttl=1))
    for wrong, found in (
        ({"ttl": "5m"}, "ttl"),
        ({"kep": 1}, "kep"),
        (5, "object"),
        ({"pin": True, "priority": 1}, "pin"),
    ):
        with pytest.raises(InvalidRequestError, match=found) as caught:
            inputs.process("c", {"prompt": "hi", "kv_retention": wrong}, SamplingParams())
        assert "kv_retention" in str(caught.value) and "ttl: seconds" in str(caught.value)
