"""Adapters of embeddings and heads, tied ones among them: beside the model with their products in its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_adapters import EMBEDDING, HEAD, HIDDEN, SHAPES, VOCAB, write_model, write_pairs
from test_adapted_engine import ADAPTED, GREEDY, PROMPTS, SETTINGS, generated, tokens_of

from engine import LLM, SamplingParams
from engine.types.errors import InvalidRequestError
from engine.types.request import Adapter
from engine_lora import LoRARequest

ENDS = {EMBEDDING: (HIDDEN, VOCAB), HEAD: (VOCAB, HIDDEN)}
INNER = {"model.layers.0.self_attn.q_proj": SHAPES["self_attn.q_proj"]}
TARGETS = {"embedding": {EMBEDDING: ENDS[EMBEDDING]}, "head": {HEAD: ENDS[HEAD]}, "all": ENDS | INNER}


class Ends:
    """The model, adapters of its ends, and the tokens that each of these gives: of no adapter first."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.model = write_model(folder / "model", one_end=tied, tie_word_embeddings=tied)
        self.requests: list[Adapter | None] = [None]
        self.merged = [self.model]
        for seed, (name, modules) in enumerate(TARGETS.items()):
            changes = write_pairs(folder / name, seed, modules)
            self.requests.append(LoRARequest(name, 0, folder / name))
            self.merged.append(write_model(folder / f"merged-{name}", changes, one_end=tied))
        self.expected = [generated(model, SETTINGS) for model in self.merged]


@pytest.fixture(scope="module", params=[False, True], ids=["two matrices", "one for both ends"])
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends(tmp_path_factory.mktemp("ends"), request.param)


@pytest.fixture(scope="module")
def served(ends: Ends) -> Iterator[LLM]:
    with LLM(model=ends.model, **ADAPTED) as llm:
        yield llm


def test_each_end_has_its_own_product(ends: Ends, served: LLM) -> None:
    """Also where both are one matrix of the model: as PEFT computes them."""
    assert len({str(tokens) for tokens in ends.expected}) == 4, "an adapter changes nothing"
    assert tokens_of(served, ends.requests) == [tokens for expected in ends.expected for tokens in expected]


def test_log_probabilities_of_prompts(ends: Ends, served: LLM) -> None:
    """Which are made of other rows than those that draw, some of them in pieces."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": [*range(7, 150)]}, {"prompt_token_ids": [5, 9, 11]}]
    settings = {**SETTINGS, "max_model_len": 256}
    with LLM(model=ends.merged[3], **settings) as llm:
        expected = [output.prompt_logprobs for output in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(model=ends.model, **{**ADAPTED, "max_model_len": 256}) as llm:
        each = [None, ends.requests[3], ends.requests[3]]
        outputs = llm.generate([prompts[0], *prompts], params, lora_request=each, use_tqdm=False)
    for output, of_prompt in zip(outputs[1:], expected, strict=True):
        assert output.prompt_logprobs is not None and of_prompt is not None
        for found, wanted in zip(output.prompt_logprobs[1:], of_prompt[1:], strict=True):
            assert found is not None and wanted is not None and found.keys() == wanted.keys()
            for token, logprob in wanted.items():
                assert abs(found[token].logprob - logprob.logprob) < 1e-6
    assert outputs[0].prompt_logprobs != outputs[1].prompt_logprobs


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"drafter": "ngram"},
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_however_they_are_computed(ends: Ends, changes: dict[str, Any]) -> None:
    """Divided, with drafts, in chunks, by the fastest operations and captured."""
    with LLM(model=ends.model, **{**ADAPTED, **changes}) as llm:
        assert tokens_of(llm, ends.requests) == [tokens for expected in ends.expected for tokens in expected]


def resaved(folder: Path, copies: dict[str, torch.Tensor]) -> Adapter:
    """An adapter, with whole matrices beside its own as PEFT saves them."""
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | copies, file)
    return LoRARequest(folder.name, 0, folder)


def test_copies_of_the_models_own_matrices(ends: Ends, served: LLM, tmp_path: Path) -> None:
    """Which PEFT saves with an adapter of either end: the same are passed over, others refused."""
    write_pairs(tmp_path / "same", 0, TARGETS["embedding"])
    own = load_file(Path(ends.model) / "model.safetensors")["model.embed_tokens.weight"]
    prefix = "base_model.model.model.embed_tokens"
    same = resaved(tmp_path / "same", {f"{prefix}.base_layer.weight": own.clone()})
    assert tokens_of(served, [same]) == ends.expected[1]
    other, longer = own.clone(), torch.cat([own, own[:3]])
    other[7] += 1
    for name, matrix, found in (
        ("other", other, "is not the model's own"),
        ("longer", longer, "has 259 rows, and the vocabulary of this model 256: it adds tokens"),
    ):
        write_pairs(tmp_path / name, 0, TARGETS["embedding"])
        refused = resaved(tmp_path / name, {f"{prefix}.weight": matrix})
        with pytest.raises(InvalidRequestError, match=found):
            served.generate(PROMPTS[0], GREEDY, lora_request=refused, use_tqdm=False)


def test_tokens_beyond_the_vocabulary(ends: Ends, served: LLM, tmp_path: Path) -> None:
    write_pairs(tmp_path / "beyond", 0, {EMBEDDING: (HIDDEN, VOCAB + 2)})
    with pytest.raises(InvalidRequestError, match="is for 258 tokens, and the vocabulary of this model has 256"):
        served.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("b", 0, tmp_path / "beyond"), use_tqdm=False)
