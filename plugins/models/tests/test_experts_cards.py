"""Cards of models with routed experts: values of their own that a body could not mean are refused before it is made."""

from __future__ import annotations

from typing import Any

import pytest

from engine.interfaces.model import ModelNeed
from engine.plugin import Registry
from engine_models.phi_card import Phimoe

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "original_max_position_embeddings": 64, "short_mscale": 1.2, "long_mscale": 1.3,
    "short_factor": [1.0, 1.3, 1.7, 2.0], "long_factor": [1.0, 2.0, 4.0, 5.0],
}  # fmt: skip


def reasons(architecture: str, **change: Any) -> list[str]:
    registry = Registry.discover()
    card: Any = registry.card(registry.find("model", architecture))
    return card.unsupported(ModelNeed(architecture=architecture, config=config(architecture, **change)))


def config(architecture: str, **change: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **change}


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 2]}, "of 2 layers none has the number 2"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [-1]}, "none has the number -1"),
        ("Glm4MoeForCausalLM", {"use_qk_norm": "yes"}, "'use_qk_norm'"),
        ("Glm4MoeForCausalLM", {"n_shared_experts": 0}, "'n_shared_experts'"),
        ("Glm4MoeForCausalLM", {"attention_bias": 1}, "'attention_bias'"),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": -1}, "'first_k_dense_replace'"),
        ("GptOssForCausalLM", {"swiglu_limit": 0}, "'swiglu_limit'"),
        ("GptOssForCausalLM", {"attention_bias": "no"}, "'attention_bias'"),
        ("GptOssForCausalLM", {"sliding_window": None}, "'sliding_window'"),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, "this routing chooses two"),
        ("PhimoeForCausalLM", {"router_jitter_noise": -0.1}, "'router_jitter_noise'"),
        ("PhimoeForCausalLM", {"lm_head_bias": "no"}, "'lm_head_bias'"),
        ("PhimoeForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("PhimoeForCausalLM", {"rope_scaling": {**LONGROPE, "long_mscale": None}}, "'long_mscale'"),
    ],
)
def test_what_is_refused(architecture: str, change: dict[str, Any], words: str) -> None:
    assert reasons(architecture) == []
    (found,) = reasons(architecture, **change)
    assert words in found


def test_longrope_has_a_factor_for_each_length() -> None:
    given = Phimoe.filled(config("PhimoeForCausalLM", rope_scaling=LONGROPE))
    assert [Phimoe.attention_factor(given, length) for length in (64, 65)] == [1.2, 1.3]
