"""Embeddings in place of tokens: those of the model's own table give what the tokens give, in float64, whatever becomes
of the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import LLM, SamplingParams
from engine.types.errors import ConfigError, InvalidRequestError, PromptTooLongError
from engine.types.pooling import PoolingParams
from engine_kit.beam_search import BeamSearchParams

SETTINGS: dict[str, Any] = {
    "dtype": "float64", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 128, "num_kv_pages": 300,
    "block_size": 4, "enable_prompt_embeds": True,
}  # fmt: skip
LENGTHS = (33, 14, 1, 40)
IDS = [[5 + (7 * i + n * n) % 400 for i in range(n)] for n in LENGTHS]
GIVEN = (33, 9, 1, 0)
"""Of each prompt so many tokens are embeddings."""
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, n=3),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, presence_penalty=0.7, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=12, ignore_eos=True, logprobs=2),
]


def outcome(llm: LLM, prompts: list[Any]) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def table(llm: LLM) -> torch.Tensor:
    """The model's embeddings."""
    assert llm.llm_engine.plan is not None
    (file,) = llm.llm_engine.plan.files.weights
    return load_file(file)["model.embed_tokens.weight"]


def prompts(embeddings: torch.Tensor) -> list[Any]:
    made: list[Any] = []
    for ids, count in zip(IDS, GIVEN, strict=True):
        given: dict[str, Any] = {"prompt_embeds": embeddings[ids[:count]]} if count else {}
        made.append(given | ({"prompt_token_ids": ids[count:]} if ids[count:] else {}))
    return made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[list[int]]]:
    return outcome(llm, IDS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 10},
        {"num_kv_pages": 26, "enable_prefix_caching": False},
        {"num_kv_pages": 26, "swap_space": "4MiB"},
        {"drafter": "ngram"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"context_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_they_give_what_tokens_give(expected: list[list[list[int]]], settings: dict[str, Any]) -> None:
    with LLM(**(SETTINGS | settings)) as llm:
        given = prompts(table(llm))
        assert outcome(llm, given) == expected
        assert outcome(llm, given) == expected, "found in the prefix cache"
        if settings.get("num_kv_pages") == 26:
            assert llm.llm_engine.stats().num_preemptions > 0
        elif "data_parallel_size" not in settings:
            assert llm.llm_engine.stats().prefix_hits > 0


def test_equal_ones_share_pages_and_others_do_not(llm: LLM) -> None:
    embeddings, ids = table(llm), IDS[3]
    other = embeddings[ids].clone()
    other[-1] *= 2

    def cached(**prompt: Any) -> int:
        (output,) = llm.generate(prompt, PARAMS[0], use_tqdm=False)  # type: ignore[arg-type]
        assert output.prompt_token_ids[: len(ids)] == ([0] * len(ids) if "prompt_embeds" in prompt else ids)
        return output.num_cached_tokens

    cached(prompt_token_ids=[*ids, 9])
    assert cached(prompt_embeds=embeddings[ids], prompt_token_ids=[8, 9], cache_salt="x") == 0
    assert cached(prompt_embeds=embeddings[ids], prompt_token_ids=[8, 9], cache_salt="x") >= len(ids)
    assert cached(prompt_embeds=embeddings[ids], prompt_token_ids=[5, 6, 7], cache_salt="x") >= len(ids)
    assert cached(prompt_embeds=embeddings[ids], prompt_token_ids=[8, 9], cache_salt="y") == 0
    assert cached(prompt_embeds=other, prompt_token_ids=[8, 9], cache_salt="x") == 0


def test_a_text_comes_behind(llm: LLM) -> None:
    embeddings, params = table(llm), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    text = llm.get_tokenizer().encode("Once upon a time", True)
    first, second = llm.generate(
        [{"prompt_embeds": embeddings[IDS[1]], "prompt": "Once upon a time"}, [*IDS[1], *text]], params, use_tqdm=False
    )
    assert first.outputs[0].text == second.outputs[0].text and first.prompt == "Once upon a time"
    (cut,) = llm.generate(
        {"prompt_embeds": embeddings[IDS[1]], "prompt": "Once upon a time", "truncate_prompt_tokens": 2},
        params,
        use_tqdm=False,
    )
    assert cut.prompt_token_ids == [0] * len(IDS[1]) + text[-2:], "tokens are cut, embeddings are not"


def test_beams_begin_with_them(llm: LLM) -> None:
    params, ids = BeamSearchParams(beam_width=2, max_tokens=4), IDS[1]
    given: dict[str, Any] = {"prompt_embeds": table(llm)[ids[:9]], "prompt_token_ids": ids[9:]}
    with_embeds, with_tokens = llm.beam_search([given, ids], params)
    found = [
        [(one.tokens[len(ids) :], round(one.cum_logprob, 9)) for one in output.sequences]
        for output in (with_embeds, with_tokens)
    ]
    assert found[0] == found[1]
    assert with_tokens.sequences[0].text.endswith(with_embeds.sequences[0].text)


def test_what_is_refused(llm: LLM) -> None:
    embeddings = table(llm)
    size = embeddings.shape[1]
    refused: list[tuple[Any, Any, str]] = [
        ({"prompt_embeds": embeddings[:3, 1:]}, PARAMS[0], f"{size} elements"),
        ({"prompt_embeds": embeddings[:3]}, SamplingParams(prompt_logprobs=1), "no log probabilities"),
        ({"prompt_embeds": embeddings[:3]}, PoolingParams(), "generates|tokens alone|pool"),
        ({"prompt_embeds": "gAR9"}, PARAMS[0], "neither a tensor nor an array"),
        ({"prompt_embeds": None}, PARAMS[0], "neither"),
    ]
    for prompt, params, found in refused:
        with pytest.raises(InvalidRequestError, match=found):
            llm.llm_engine.add_request("refused", prompt, params)
    for prompt in (
        {"prompt_embeds": torch.zeros(128, size)},
        {"prompt_embeds": torch.zeros(100, size), "prompt_token_ids": [5] * 28},
    ):
        with pytest.raises(PromptTooLongError):
            llm.llm_engine.add_request("refused", prompt, PARAMS[0])  # type: ignore[arg-type]
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_engine_that_takes_none() -> None:
    off = SETTINGS | {"enable_prompt_embeds": False}
    with LLM(**off) as llm, pytest.raises(InvalidRequestError, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": table(llm)[:3]}, PARAMS[0], use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"runner": "pooling"}, "pools"),
        ({"model_impl": "transformers"}, "tokens alone"),
        ({"evictor": "cacheblend"}, "later"),
    ],
)
def test_an_engine_that_could_not(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=f"enable_prompt_embeds=True.*{found}"):
        LLM(**SETTINGS, **settings)
