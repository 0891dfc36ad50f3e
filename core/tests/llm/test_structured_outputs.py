"""`structured_outputs` as users meet it: `LLM`, `AsyncLLM`, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import LLM, AsyncLLM, EngineArgs, SamplingParams, StructuredOutputsParams
from engine.types.errors import DriverNotFoundError, EngineError, InvalidRequestError
from engine.types.structured_outputs import MAX_CHOICES

TEXTS = ["yes", "no", "yes, but not today", "Grüße 你好"]
SETTINGS: dict[str, Any] = {"dtype": "float64", "max_num_seqs": 6, "num_kv_pages": 300, "max_num_batched_tokens": 24}
CHOICE: dict[str, Any] = {**SETTINGS, "grammar": "choice"}  # others may be installed, and `auto` would take them


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("structured")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=folder, **CHOICE) as model:
        yield model


def params(choice: list[str] | None = None, **fields: Any) -> SamplingParams:
    constraint = StructuredOutputsParams(choice=choice or TEXTS)
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 60, "structured_outputs": constraint, **fields})


def test_the_output_is_one_of_the_texts(llm: LLM) -> None:
    outputs = llm.generate(["Is it?"] * 24, [params(seed=i) for i in range(24)], use_tqdm=False)
    texts = {output.outputs[0].text for output in outputs}
    assert len(texts) > 1 and texts <= {*TEXTS}
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert {output.outputs[0].stop_reason for output in outputs} == {None}


def test_it_is_the_likeliest_way_that_the_texts_allow(llm: LLM) -> None:
    """Greedy, against the model's own scores: at each position the allowed token that scores best."""
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("Is it?", params(["ab", "ba"], temperature=0.0, logprobs=64), use_tqdm=False)
    done = output.outputs[0]
    assert done.logprobs is not None
    first = {text: tokenizer.encode(text, False)[0] for text in ("a", "b", "ab", "ba")}
    scores = {t: done.logprobs[0][t].logprob for t in first.values() if t in done.logprobs[0]}
    if scores:
        assert done.token_ids[0] == max(scores, key=lambda t: scores[t])
    free = llm.generate("Is it?", SamplingParams(temperature=0.0, max_tokens=1, logprobs=64), use_tqdm=False)[0]
    assert free.outputs[0].logprobs is not None
    for token, entry in done.logprobs[0].items():
        if token in free.outputs[0].logprobs[0]:  # as without the constraint: before masks
            assert entry.logprob == pytest.approx(free.outputs[0].logprobs[0][token].logprob, abs=1e-6)


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 40}, {"n": 4}, {"logprobs": 2}, {"top_k": 1}])
def test_beside_other_parameters(llm: LLM, fields: dict[str, Any]) -> None:
    (output,) = llm.generate("Is it?", params(["yes", "no"], seed=3, **fields), use_tqdm=False)
    assert len(output.outputs) == fields.get("n", 1)
    for done in output.outputs:
        assert done.text in ("yes", "no") and done.finish_reason == "stop"
        if done.logprobs is not None:
            assert len(done.logprobs) == len(done.token_ids)


def test_stop_strings_and_max_tokens_cut_it(llm: LLM) -> None:
    cut = params(["yes, but not today"], stop=["but"])
    short = params(["yes, but not today"], max_tokens=2)
    outputs = llm.generate(["Is it?"] * 2, [cut, short], use_tqdm=False)
    assert (outputs[0].outputs[0].text, outputs[0].outputs[0].stop_reason) == ("yes, ", "but")
    assert outputs[1].outputs[0].finish_reason == "length"
    assert "yes, but not today".startswith(outputs[1].outputs[0].text)


def test_where_nothing_is_left_the_request_ends_with_an_error(llm: LLM) -> None:
    """And its neighbours do not."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("x", False)
    llm_engine = llm.llm_engine
    llm_engine.add_request("bad", "Is it?", params(["yes"], allowed_token_ids=ids))
    llm_engine.add_request("good", "Is it?", params(["yes"]))
    found: dict[str, Any] = {}
    while llm_engine.has_unfinished_requests():
        found.update({output.request_id: output for output in llm_engine.step()})
    assert found["good"].outputs[0].text == "yes"
    assert found["bad"].outputs[0].finish_reason == "error" and found["bad"].outputs[0].text == ""
    assert "no token is left" in str(found["bad"].error)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (StructuredOutputsParams(regex="a+"), r"structured_outputs.regex='a\+'.*'choice' enforces choice.*--grammar"),
        (StructuredOutputsParams(json={"type": "object"}), "structured_outputs.json="),
        (StructuredOutputsParams(json_object=True), "structured_outputs.json_object=True"),
        (StructuredOutputsParams(grammar="root ::= 'a'"), "structured_outputs.grammar="),
        (StructuredOutputsParams(structural_tag="{}"), "structured_outputs.structural_tag="),
        (StructuredOutputsParams(), "no constraint"),
        (StructuredOutputsParams(choice=["a"], regex="a"), "choice and regex"),
        (StructuredOutputsParams(choice=[]), "nothing to write"),
        (StructuredOutputsParams(choice=["a", ""]), "empty text"),
        (StructuredOutputsParams(choice="ab"), "not a list"),  # type: ignore[arg-type]
        (StructuredOutputsParams(choice=["a"] * (MAX_CHOICES + 1)), "at most"),
        (StructuredOutputsParams(choice=["\ud800"]), "Unicode"),
        ({"choice": ["a"]}, "no StructuredOutputsParams"),
    ],
)
def test_what_is_refused(llm: LLM, constraint: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate("x", SamplingParams(structured_outputs=constraint), use_tqdm=False)


@pytest.mark.parametrize("length", [1, 2])
def test_a_constraint_that_begins_later(llm: LLM, length: int) -> None:
    """Before the ids have come the output is the free one's; behind them it is a text. Others beside it are as ever."""
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    tokens = llm.generate("Is it?", free, use_tqdm=False)[0].outputs[0].token_ids
    start = list(tokens[4 : 4 + length])
    ends = next(i + length for i in range(len(tokens)) if list(tokens[i : i + length]) == start)
    later = params(["yes", "no"], temperature=0.0, ignore_eos=True)
    assert later.structured_outputs is not None
    later.structured_outputs.start_after = start
    outputs = llm.generate(["Is it?"] * 3, [later, params(["ab"]), free], use_tqdm=False)
    done = outputs[0].outputs[0]
    assert list(done.token_ids[:ends]) == list(tokens[:ends]) and done.finish_reason == "stop"
    assert llm.get_tokenizer().decode(done.token_ids[ends:]) in ("yes", "no")
    assert outputs[1].outputs[0].text == "ab"
    assert outputs[2].outputs[0].token_ids == tokens
    never = params(["yes"], temperature=0.0, max_tokens=6, ignore_eos=True)
    assert never.structured_outputs is not None
    never.structured_outputs.start_after = [tokens[0], tokens[0], tokens[0], tokens[0]]
    (output,) = llm.generate("Is it?", never, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert list(output.outputs[0].token_ids) == list(tokens[:6])


def test_a_grammar_that_is_not_installed(folder: Path) -> None:
    with pytest.raises(DriverNotFoundError, match="nosuch"):
        LLM(model=folder, grammar="nosuch", **SETTINGS)


def test_parameters_travel() -> None:
    sent = params(["a"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=SamplingParams) == sent


def test_async(folder: Path) -> None:
    """With the core in its own process: the tokenizer is read there."""

    async def run() -> list[str]:
        engine = AsyncLLM(EngineArgs(model=folder, **CHOICE))
        await engine.start()
        try:

            async def one(index: int) -> str:
                text = ""
                async for output in engine.generate("Is it?", params(seed=index), f"r{index}"):
                    text = output.outputs[0].text
                return text

            with pytest.raises(EngineError, match="regex"):
                async for _ in engine.generate(
                    "x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), "bad"
                ):
                    pass
            return list(await asyncio.gather(*(one(index) for index in range(8))))
        finally:
            engine.shutdown()

    texts = asyncio.run(run())
    assert len(texts) == 8 and {*texts} <= {*TEXTS}
