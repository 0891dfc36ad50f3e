"""Over HTTP, by the official client: what edits, ranks and scores, and how nonsense is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from engine import LLM, AsyncLLM, EngineArgs, SamplingParams
from engine.types.errors import InvalidRequestError

PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The offline engine: what the served answers are compared with."""
    return LLM(model="tiny", dtype="float64", num_kv_pages=1000)


def offline(llm: LLM, **fields: Any) -> Any:
    (output,) = llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)
    return output


def test_logit_bias(client: openai.OpenAI, llm: LLM) -> None:
    free = offline(llm, temperature=0, max_tokens=8)
    bias = {str(free.outputs[0].token_ids[0]): -100}
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logit_bias=bias)
    expected = offline(llm, temperature=0, max_tokens=8, logit_bias=bias)
    assert answer.choices[0].text == expected.outputs[0].text != free.outputs[0].text
    forced = llm.get_tokenizer().encode("z", False)[0]
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=4, temperature=0, logit_bias={str(forced): 100}
    )
    assert chat.choices[0].message.content == "zzzz"


def test_allowed_token_ids_and_bad_words(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("01", False)
    extra: dict[str, Any] = {"allowed_token_ids": ids, "bad_words": ["00", "11"]}
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    text = client.completions.create(prompt=PROMPT, **options, extra_body=extra).choices[0].text
    assert text in ("010101", "101010")
    chat = client.chat.completions.create(messages=CHAT, **options, extra_body=extra)
    assert chat.choices[0].message.content in ("010101", "101010")


def test_best_of(client: openai.OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2, "best_of": 5}
    answer = client.completions.create(model="tiny", prompt=PROMPT, **options, extra_body={"ignore_eos": True})
    expected = offline(llm, ignore_eos=True, **options)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == [completion.text for completion in expected.outputs]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None and answer.usage.completion_tokens == 30, "all five are counted"


def test_prompt_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    extra = {"prompt_logprobs": 1}
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, temperature=0, extra_body=extra)
    (found,) = (choice.model_extra["prompt_logprobs"] for choice in answer.choices if choice.model_extra)
    expected = offline(llm, temperature=0, max_tokens=2, prompt_logprobs=1).prompt_logprobs
    assert found[0] is None and len(found) == len(expected)
    for position, candidates in zip(found[1:], expected[1:], strict=True):
        assert list(position) == [str(token) for token in candidates]
        for token, candidate in candidates.items():
            assert position[str(token)]["logprob"] == pytest.approx(candidate.logprob, abs=1e-6)
            assert position[str(token)]["rank"] == candidate.rank
    chat = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2, extra_body=extra)
    assert chat.model_extra is not None and chat.usage is not None
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"extra_body": {"extra_args": {"nobody": 1}}}, "extra_args"),
        ({"extra_body": {"vllm_xargs": {"nobody": 1}}}, "extra_args"),
    ],
)
def test_refusals_name_the_parameter(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=2, **fields)
    assert caught.value.param == param


def test_prompt_logprobs_are_not_streamed_and_chat_has_no_best_of(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not allowed with stream"):
        client.completions.create(model="tiny", prompt="a", stream=True, extra_body={"prompt_logprobs": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"best_of": 2})
    assert caught.value.param == "best_of"


def test_async_llm_gives_what_llm_gives(llm: LLM) -> None:
    """Everything crosses the core's process: ids, words, biases, scores of the prompt; the best come once."""
    several = [
        {"logit_bias": {40: 5.0, 41: -100.0}, "temperature": 0.8},
        {"bad_words": ["a", "the"], "temperature": 0.9, "prompt_logprobs": 2},
        {"allowed_token_ids": list(range(40, 90)), "temperature": 1.1, "n": 2, "best_of": 4},
    ]
    params = [SamplingParams(**fields, seed=i, max_tokens=8) for i, fields in enumerate(several)]

    async def run() -> list[list[Any]]:
        engine = AsyncLLM(EngineArgs(model="tiny", dtype="float64", num_kv_pages=1000))
        await engine.start()
        try:
            with pytest.raises(InvalidRequestError, match="extra_args"):
                await engine.submit(PROMPT, SamplingParams(extra_args={"nobody": 1}))

            async def all_of(one: SamplingParams) -> list[Any]:
                return [output async for output in engine.generate(PROMPT, one)]

            return await asyncio.gather(*map(all_of, params))
        finally:
            engine.shutdown()

    expected = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    for outputs, offline_output in zip(asyncio.run(run()), expected, strict=True):
        assert [(c.text, c.cumulative_logprob) for c in outputs[-1].outputs] == [
            (c.text, c.cumulative_logprob) for c in offline_output.outputs
        ]
        assert outputs[-1].prompt_logprobs == offline_output.prompt_logprobs
        best = len(offline_output.outputs) > 1
        assert len(outputs) == 1 or not best
        assert outputs[-1].num_discarded_tokens == offline_output.num_discarded_tokens


def test_structured_outputs(client: openai.OpenAI) -> None:
    texts = ["blue", "green", "it depends"]
    extra = {"structured_outputs": {"choice": texts}}
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=30, temperature=1.0, n=4, extra_body=extra
    )
    assert {choice.message.content for choice in answer.choices} <= {*texts}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=1.0, stream=True, extra_body=extra
    )
    assert "".join(event.choices[0].text for event in stream if event.choices) in texts
    for wrong, message in (
        ({"regex": "a("}, "structured_outputs.regex"),
        ({"json": {"type": "objec"}}, "structured_outputs.json"),
        ({"choice": ["a"], "regex": "a"}, "exactly one"),
        ({"choices": ["a"]}, "choice"),
        ({"choice": "a"}, "list"),
        ({}, "exactly one"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=3, extra_body={"structured_outputs": wrong}
            )
