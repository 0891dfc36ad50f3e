"""Checkpoint `dummy`: made-up models that load, serve, and are the same each time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from engine.types.errors import ModelNotFoundError
from engine.types.params import SamplingParams
from engine_kit.llm import LLM
from engine_reference.checkpoint_dummy.card import DummyCheckpoint
from engine_reference.checkpoint_dummy.sizes import config_of, shapes_of
from engine_reference.checkpoint_dummy.weights import DummyWeights


def test_the_sizes_are_those_of_the_published_models():
    """Parameters as the model cards of Qwen3 and Llama 3.1 give them."""
    for name, millions in (("0.6B", 596), ("1.7B", 1721), ("4B", 4022), ("8B", 8191), ("llama-8B", 8030)):
        shapes = shapes_of(config_of(f"dummy:{name}"))
        assert sum(math.prod(shape) for shape in shapes.values()) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_latent_attention():
    """DeepSeek's dimensions, named by how large they are, and a small one that computes."""
    shapes = shapes_of(config_of("dummy:mla-2.6B"))
    assert sum(math.prod(shape) for shape in shapes.values()) / 1e9 == pytest.approx(2.6, rel=0.01)
    llm = LLM("dummy:mla-tiny,heads=8", dtype="float32", max_model_len=64, kv_cache_memory=2**20)
    try:
        output = llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=5, ignore_eos=True))
    finally:
        llm.shutdown()
    assert len(output[0].outputs[0].token_ids) == 5


def test_numbers_can_be_changed():
    config = config_of("dummy:tiny,layers=3,vocab=1000")
    assert (config["num_hidden_layers"], config["vocab_size"], config["hidden_size"]) == (3, 1000, 64)
    assert len(shapes_of(config)) == 3 * 11 + 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dummy:7C", "the sizes are tiny, 0.6B"),
        ("dummy:", "the sizes are"),
        ("dummy:tiny,depth=3", "what can be changed"),
        ("dummy:tiny,layers=0", "whole number"),
        ("dummy:tiny,layers=two", "whole number"),
        ("dummy:tiny,kv_heads=3", "does not divide"),
        ("dummy:tiny,head_dim=7", "even"),
        ("dummy:tiny,vocab=100", "258"),
        ("dummy:mla-tiny,kv_heads=2", "what can be changed"),
        ("dummy:mla-tiny,rope=3", "even"),
    ],
)
def test_names_that_make_no_model(name, message):
    assert DummyCheckpoint.claims(name)
    with pytest.raises(ModelNotFoundError, match=message):
        DummyCheckpoint.resolve(name)


def test_other_names_are_left_alone():
    assert not any(DummyCheckpoint.claims(name) for name in ("dummy", "tiny", "./dummy:0.6B", ""))


def weights(name: str) -> dict[str, torch.Tensor]:
    start = SimpleNamespace(files=DummyCheckpoint.resolve(name))
    return dict(DummyWeights(SimpleNamespace(start=start, device=torch.device("cpu"))).weights())


def test_a_llama_computes():
    llm = LLM(
        "dummy:llama-8B,layers=2,hidden=64,inner=96,heads=4,kv_heads=2,head_dim=16,vocab=300",
        dtype="float32", max_model_len=64, kv_cache_memory=2**20,
    )  # fmt: skip
    try:
        output = llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=5, ignore_eos=True))
    finally:
        llm.shutdown()
    assert len(output[0].outputs[0].token_ids) == 5


def test_weights_are_seeded_by_name_and_scaled():
    first, second = weights("dummy:tiny"), weights("dummy:tiny")
    assert all(torch.equal(first[name], second[name]) for name in first)
    matrix = first["model.layers.0.mlp.down_proj.weight"].float()
    assert matrix.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])
    assert all(tensor.dtype == torch.bfloat16 for tensor in first.values())


def test_an_engine_serves_one():
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(model="dummy:tiny", max_model_len=64, max_num_seqs=2, kv_cache_memory="1MiB", dtype="float32") as llm:
        (output,) = llm.generate("Hällo", params, use_tqdm=False)
        assert output.prompt_token_ids == list("Hällo".encode())
        assert len(output.outputs[0].token_ids) == 8
        (again,) = llm.generate("Hällo", params, use_tqdm=False)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        (answer,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
        assert bytes(answer.prompt_token_ids) == b"user: Hi\nassistant: "
