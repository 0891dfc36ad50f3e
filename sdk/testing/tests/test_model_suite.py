"""How the suite of models finds out what it tests: the suite for encoders, the config, the tensors, the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_model_cards import Sound
from engine_gpt2.card import GPT2Card

from engine.interfaces.model import ModelNeed
from engine_sdk.conformance import ModelConformance
from engine_sdk.conformance.model.oracle import TOLERANCE, Oracle
from engine_sdk.conformance.model.small import small_config
from engine_sdk.conformance.report import run_driver


@pytest.mark.parametrize(
    ("driver", "test"), [("BertModel", "test_it_is_an_encoder"), ("LlamaModel", "test_it_is_a_decoder")]
)
def test_the_command_finds_the_suite(driver: str, test: str) -> None:
    report = run_driver("model", driver, {}, select="test_it_is or test_describe")
    assert test in {result.test for result in report.of("passed")} and not report.of("failed")


def test_tensors_are_transformers_or_the_layers_own() -> None:
    """A card that transformers does not know has the slots of `engine.modeling`, which are the same."""
    known = type("Known", (ModelConformance,), {"card": Sound, "oracle": "LlamaForCausalLM"})
    own = type("Own", (ModelConformance,), {"card": Sound})
    assert dict(own.tensors()) == dict(known.tensors())


def test_tensors_that_nobody_knows() -> None:
    """A body that is not made of `engine.modeling` has to say them."""

    class Bare:
        def __init__(self, context: object) -> None:
            pass

    own = type("Own", (ModelConformance,), {"card": Sound, "body": classmethod(lambda cls: Bare)})
    with pytest.raises(pytest.fail.Exception, match="name the checkpoint's tensors: shapes = "):
        own.tensors()
    said = type("Said", (own,), {"shapes": {"weight": (3, 4)}})
    assert said.tensors() == {"weight": (3, 4)}


def test_a_derived_config_has_the_architectures_own_words() -> None:
    """GPT-2 says n_embd; nothing of it is said in other words beside, and its own default flags stand."""
    found = small_config("GPT2LMHeadModel", {"num_hidden_layers": 3})
    assert (found["n_embd"], found["n_layer"], found["n_head"], found["n_positions"]) == (32, 3, 4, 64)
    assert found["tie_word_embeddings"] is True and found["layer_norm_epsilon"] == 1e-2
    assert not {"hidden_size", "num_hidden_layers", "head_dim", "num_key_value_heads"} & found.keys()
    mixtral = small_config("MixtralForCausalLM", {})
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"], mixtral["model_type"]) == (4, 2, "mixtral")


def test_names_are_those_that_transformers_saves() -> None:
    """Mixtral's class holds all experts in one tensor, and saves each by itself; shared matrices are saved once."""
    names = Oracle("MixtralForCausalLM", small_config("MixtralForCausalLM", {})).shapes
    assert names["model.layers.1.block_sparse_moe.experts.3.w2.weight"] == (32, 48)
    assert "lm_head.weight" not in Oracle("GPT2LMHeadModel", small_config("GPT2LMHeadModel", {})).shapes


def test_float32_where_a_class_refuses_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is then as far from the model as float32 is, and the suite asks for no more."""
    from transformers import GPT2LMHeadModel

    forward = GPT2LMHeadModel.forward

    def refusing(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.dtype == torch.float64:
            raise RuntimeError("expected Float32 or BFloat16")
        return forward(model, *args, **kwargs)

    config = small_config("GPT2LMHeadModel", {})
    ids = list(range(3, 20))
    exact = Oracle("GPT2LMHeadModel", config)(ids)
    monkeypatch.setattr(GPT2LMHeadModel, "forward", refusing)
    oracle = Oracle("GPT2LMHeadModel", config)
    assert oracle.dtype == torch.float32
    error = float((oracle(ids) - exact).abs().max() / exact.abs().max())
    assert 1e-9 < error < TOLERANCE / 10
    suite = type("Suite", (ModelConformance,), {"card": GPT2Card, "architecture": "GPT2LMHeadModel"})
    suite().test_as_transformers_computes_it(6)
    assert suite.reference().dtype == torch.float32


def test_without_an_oracle_it_is_held_against_itself() -> None:
    """`oracle = None`: what transformers would say is skipped, all else is tested, with the tensors of the layers."""
    alone = type("Alone", (ModelConformance,), {"card": Sound, "architecture": "LlamaForCausalLM", "oracle": None})
    assert alone.why_no_oracle() and "model.layers.1.mlp.up_proj.weight" in alone.tensors()
    for test in ("test_variants_of_the_config", "test_as_transformers_computes_it"):
        with pytest.raises(pytest.skip.Exception, match="oracle = None"):
            getattr(alone(), test)(*([6] if "as_" in test else []))
    for test in ("test_decode", "test_ragged_batch", "test_a_missing_tensor", "test_every_tensor_matters"):
        getattr(alone(), test)()


def test_a_config_file_takes_the_place_of_the_derived_one(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**small_config("GPT2LMHeadModel", {"n_layer": 1}), "activation_function": "gelu"}))
    words = {"card": GPT2Card, "architecture": "GPT2LMHeadModel", "config": file}
    suite = type("FromFile", (ModelConformance,), words)
    assert suite.description().num_layers == 1 and suite.whole_config()["activation_function"] == "gelu"
    suite().test_as_transformers_computes_it(6)


def test_a_config_that_is_too_large_for_a_suite(tmp_path: Path) -> None:
    """A whole model's config.json is refused before anything of its size is made."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}))
    words = {"card": GPT2Card, "architecture": "GPT2LMHeadModel", "config": file}
    with pytest.raises(ValueError, match="124,439,808 parameters, the suite takes 4,000,000"):
        type("Large", (ModelConformance,), words).reference()


def test_what_a_card_raises_at_a_variant_is_a_fault() -> None:
    """A KeyError is no reason; what transformers refuses too is nobody's fault."""

    class Raises(GPT2Card):
        @classmethod
        def unsupported(cls, need: ModelNeed) -> list[str]:
            {"gelu_new": 1, "gelu": 2}[need.config["activation_function"]]
            return super().unsupported(need)

    suite = type("Suite", (ModelConformance,), {"card": Raises, "architecture": "GPT2LMHeadModel"})
    with pytest.raises(AssertionError, match=r"activation_function = 'relu': KeyError: 'relu'") as caught:
        suite().test_variants_of_the_config()
    assert "n_head" not in str(caught.value) and "'gelu'" not in str(caught.value).partition("\n")[2]
