"""Adapters in an engine: beside the model with their products in its weights, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from small_adapters import (
    EMBEDDING,
    HIDDEN,
    LAYERS,
    SHAPES,
    TOKENIZER,
    VOCAB,
    products,
    write_adapter,
    write_model,
    write_pairs,
)

from engine import LLM, SamplingParams
from engine.types.errors import ConfigError, InvalidRequestError, OptionsError
from engine.types.request import Adapter
from engine.types.structured_outputs import StructuredOutputsParams
from engine_lora import LoRARequest

PROMPTS = [{"prompt_token_ids": [5, 9, 17 + i, 33, *range(40, 40 + 9 * i)]} for i in range(3)]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "max_model_len": 128, "num_kv_pages": 64, "tokenizer": TOKENIZER, "max_num_seqs": 16,
}  # fmt: skip
ADAPTED: dict[str, Any] = {**SETTINGS, "adapter": "lora", "adapter.max_loras": 2, "adapter.max_lora_rank": 8}
PATTERNS = {"q_proj": 2, "mlp.down_proj": 8}
FORMS: dict[str, tuple[dict[str, Any], float | dict[str, float]]] = {
    "all": ({}, 2.0),
    "some": ({"targets": ["self_attn.q_proj", "self_attn.v_proj"], "rank": 8, "lora_alpha": 4}, 0.5),
    "rslora": (
        {"use_rslora": True, "targets": ["mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj"]},
        4.0,
    ),
    "patterns": (
        {"rank_pattern": {"self_attn.q_proj": 2, "mlp.down_proj": 8}, "alpha_pattern": {"down_proj": 24}},
        {name: {"self_attn.q_proj": 4.0, "mlp.down_proj": 3.0}.get(name, 2.0) for name in SHAPES},
    ),
}


class Adapters:
    """The model, adapters of it, and the tokens that each of these gives."""

    def __init__(self, folder: Path) -> None:
        self.model = write_model(folder / "model")
        self.requests: list[Adapter | None] = [None]
        merged = [self.model]
        for seed, (name, (config, scale)) in enumerate(FORMS.items()):
            path = write_adapter(folder / name, seed, **config)
            self.requests.append(LoRARequest(name, seed, path))
            merged.append(write_model(folder / f"merged-{name}", products(path, scale)))
        self.expected = [generated(model, SETTINGS) for model in merged]

    def expected_of(self, order: Sequence[int]) -> list[list[int]]:
        """Of each prompt by each of these."""
        return [tokens for index in order for tokens in self.expected[index]]


def generated(model: str, settings: dict[str, Any]) -> list[list[int]]:
    with LLM(model=model, **settings) as llm:
        return tokens_of(llm)


def tokens_of(llm: LLM, adapters: Sequence[Adapter | None] = (None,)) -> list[list[int]]:
    """The tokens of all prompts by each of these, in one call."""
    each = [adapter for adapter in adapters for _ in PROMPTS]
    outputs = llm.generate(PROMPTS * len(adapters), GREEDY, lora_request=each, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(adapters: Adapters) -> Iterator[LLM]:
    with LLM(model=adapters.model, **ADAPTED) as llm:
        yield llm


def test_each_is_the_model_with_its_products(adapters: Adapters, llm: LLM) -> None:
    assert len({str(tokens) for tokens in adapters.expected}) == len(adapters.expected), "an adapter changes nothing"
    for index, adapter in enumerate(adapters.requests):
        assert tokens_of(llm, [adapter]) == adapters.expected[index]


def test_all_in_one_call_are_as_each_alone(adapters: Adapters, llm: LLM) -> None:
    """More of them than places on the device."""
    for order in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2, 4]):
        assert tokens_of(llm, [adapters.requests[index] for index in order]) == adapters.expected_of(order)


def test_eight_in_one_batch_up_to_the_largest_rank(adapters: Adapters, tmp_path: Path) -> None:
    """Each gives what it gives alone; the widest what the model gives with its products."""
    ranks = (1, 2, 3, 8, 16, 40, 64, 256)
    paths = [write_adapter(tmp_path / f"r{rank}", rank, rank=rank, lora_alpha=rank / 16) for rank in ranks]
    requests = [LoRARequest(f"r{rank}", 0, path) for rank, path in zip(ranks, paths, strict=True)]
    room = {"adapter.max_loras": 8, "adapter.max_lora_rank": 256}
    with LLM(model=adapters.model, **{**ADAPTED, **room, "max_num_seqs": 24}) as llm:
        alone = [tokens_of(llm, [request]) for request in requests]
        assert tokens_of(llm, requests) == [tokens for each in alone for tokens in each]
    assert alone[-1] == generated(write_model(tmp_path / "merged", products(paths[-1], 1 / 16)), SETTINGS)
    assert len({str(tokens) for tokens in alone}) > 4


def test_prompts_of_different_adapters_share_no_pages(adapters: Adapters, llm: LLM) -> None:
    """And those of one do, also after another had its place."""
    prompt = {"prompt_token_ids": [*range(100, 150)]}
    cached = []
    for index in (1, 2, 3, 1, 0, 0, 2):
        (output,) = llm.generate(prompt, GREEDY, lora_request=adapters.requests[index], use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert [count > 0 for count in cached] == [False, False, False, True, False, True, True]


def test_chunks_and_constraints(adapters: Adapters) -> None:
    """Prompts in pieces, and choices that are spelt out under an adapter."""
    settings = {**ADAPTED, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    with LLM(model=adapters.model, **settings) as llm:
        assert tokens_of(llm, adapters.requests) == adapters.expected_of(range(5))
        params = SamplingParams(
            max_tokens=8, temperature=0.0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
        )
        outputs = llm.generate([[5, 9]] * 2, params, lora_request=adapters.requests[1:3], use_tqdm=False)
        assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}


def test_drafts_are_checked_by_the_adapter(adapters: Adapters) -> None:
    with LLM(model=adapters.model, drafter="ngram", **ADAPTED) as llm:
        assert tokens_of(llm, adapters.requests) == adapters.expected_of(range(5))


@pytest.mark.parametrize("divided", ["tensor", "pipeline", "context"])
def test_over_several_workers(adapters: Adapters, divided: str) -> None:
    with LLM(model=adapters.model, **{f"{divided}_parallel_size": 2}, **ADAPTED) as llm:
        assert tokens_of(llm, adapters.requests) == adapters.expected_of(range(5))


def test_what_cannot_be_loaded_is_refused_and_others_go_on(adapters: Adapters, llm: LLM, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "high", 9, rank=16)
    high = LoRARequest("high", 9, path)
    outputs = llm.generate(
        PROMPTS[:2], GREEDY, lora_request=[high, adapters.requests[1]], use_tqdm=False, return_errors=True
    )
    assert isinstance(outputs[0].error, InvalidRequestError) and "--adapter.max-lora-rank 16" in str(outputs[0].error)
    patterns = {"rank_pattern": {"mlp.up_proj": 300}}
    most = LoRARequest("most", 9, write_adapter(tmp_path / "most", 9, rank=16, **patterns))
    with pytest.raises(InvalidRequestError, match="256 is the most that can be; merge it"):
        tokens_of(llm, [most])
    assert list(outputs[1].outputs[0].token_ids) == adapters.expected[1][1]


def test_an_adapter_of_another_model_is_refused(adapters: Adapters, llm: LLM, tmp_path: Path) -> None:
    """By the layer: one of other sizes, one more than there are, one that no such model has. Nothing of it is kept."""
    place = "model.layers.0.self_attn.q_proj"
    for number, (module, inputs, found) in enumerate(
        [
            (place, HIDDEN + 16, rf"A of {place} is \[4, 48\].*they would be \[4, 32\].*trained for this model"),
            (f"model.layers.{LAYERS}.self_attn.q_proj", HIDDEN, f"no layer model.layers.{LAYERS}.self_attn.q_proj"),
            ("model.layers.0.self_attn.out_proj", HIDDEN, "no layer model.layers.0.self_attn.out_proj"),
        ]
    ):
        sound = {"model.layers.1.mlp.up_proj": SHAPES["mlp.up_proj"]}
        write_pairs(tmp_path / f"a{number}", number, sound | {module: (HIDDEN, inputs)})
        with pytest.raises(InvalidRequestError, match=found):
            tokens_of(llm, [LoRARequest(f"a{number}", 0, tmp_path / f"a{number}")])
    assert tokens_of(llm, adapters.requests[:2]) == adapters.expected_of(range(2))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30], ids=str)
def test_numbers_that_are_none_are_refused(number: float, tmp_path: Path) -> None:
    """Also those that are infinite in the engine's dtype alone: with zeros they would be NaN for other requests."""
    path = tmp_path / "a"
    write_pairs(path, 1, {EMBEDDING: (HIDDEN, VOCAB)})
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{EMBEDDING}.lora_embedding_A"][1, 3] = number
    save_file(tensors, file)
    settings = {**ADAPTED, "dtype": "float16"}
    found = "embed_tokens: some of its numbers are infinite or NaN"
    with LLM(model=write_model(tmp_path / "base"), **settings) as llm, pytest.raises(InvalidRequestError, match=found):
        tokens_of(llm, [LoRARequest("a", 0, path)])


def test_an_engine_without_adapters_says_how_to_have_some(adapters: Adapters) -> None:
    with LLM(model=adapters.model, **SETTINGS) as llm, pytest.raises(InvalidRequestError, match="--adapter DRIVER"):
        tokens_of(llm, adapters.requests[1:2])


def test_fewer_on_the_host_than_on_the_device_are_refused(adapters: Adapters) -> None:
    with pytest.raises(OptionsError, match="max_cpu_loras=1 is less than max_loras=2"):
        LLM(model=adapters.model, **ADAPTED, **{"adapter.max_cpu_loras": 1})


def test_natively_and_captured(adapters: Adapters) -> None:
    """In float32 by the fastest operations of this machine, decodes replayed from a tape where it has one."""
    with LLM(model=adapters.model, **{**ADAPTED, "dtype": "float32"}) as llm:
        assert tokens_of(llm, adapters.requests) == adapters.expected_of(range(5))


def test_what_computes_some_tokens_alone_goes_with_no_adapter(adapters: Adapters) -> None:
    pytest.importorskip("engine_blend", reason="engine-blend is not installed")
    with pytest.raises(ConfigError, match="evictor 'cacheblend' has later layers compute some"):
        LLM(model=adapters.model, evictor="cacheblend", **ADAPTED)
