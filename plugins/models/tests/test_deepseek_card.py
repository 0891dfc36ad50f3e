"""The cards of DeepSeek's decoders: what config.json makes of the cache, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import LATENT_ARCHITECTURES

from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.interfaces.model import ModelNeed
from engine.types.model import KVSpec
from engine.types.parallel import Parallel
from engine_kit.routing import RouteForm
from engine_models.deepseek_card import DeepseekV2, DeepseekV3

CARDS = {"DeepseekV2ForCausalLM": DeepseekV2, "DeepseekV3ForCausalLM": DeepseekV3}

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "first_k_dense_replace": 3, "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
"""The published config, shortened."""


def reasons(config: dict[str, Any], tp: int = 1) -> list[str]:
    card = CARDS[config["architectures"][0]]
    need = ModelNeed(architecture=config["architectures"][0], config=config, parallel=Parallel(tp=tp))
    return card.mismatches(need) + card.unsupported(need)


def test_the_published_config() -> None:
    model = CARDS["DeepseekV3ForCausalLM"].describe(V3)
    assert set(model.kv_specs) == {KVSpec(kind="mla", num_kv_heads=1, head_size=576, rope_size=64)}
    assert (model.num_layers, model.num_q_heads, model.max_model_len, model.config) == (61, 128, 163840, V3)
    assert DeepseekV3.sparse(V3) == range(3, 61)
    assert DeepseekV3.routing.form(DeepseekV3.filled(V3)) == RouteForm(
        8, sigmoid=True, renormalise=True, scale=2.5, groups=8, top_groups=4, pairs=True
    )
    assert reasons(V3, 8) == []
    for dense in ({"first_k_dense_replace": 61}, {"n_routed_experts": None}, {"n_routed_experts": 0}):
        assert reasons(V3 | dense, 8) == []


@pytest.mark.parametrize("architecture", LATENT_ARCHITECTURES)
def test_experts_that_a_config_leaves_to_the_class(architecture: str) -> None:
    """transformers' classes have experts where the config does not say how many."""
    config = {key: value for key, value in V3.items() if key not in ("n_routed_experts", "first_k_dense_replace")}
    card = CARDS[architecture]
    first = {"DeepseekV2ForCausalLM": 0, "DeepseekV3ForCausalLM": 3}[architecture]
    assert card.sparse(config) == range(first, 61)
    assert card.routing.num_experts(card.filled(config)) == {0: 64, 3: 256}[first]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"kv_lora_rank": "big"}, "'kv_lora_rank'"),
        ({"q_lora_rank": 0}, "'q_lora_rank'"),
        ({"v_head_dim": -1}, "'v_head_dim'"),
        ({"rope_interleave": "yes"}, "'rope_interleave'"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"n_group": 7}, "256 experts do not stand in 7 groups"),
        ({"topk_group": 9}, "'topk_group'"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "33 of 32 experts"),
        ({"n_group": 256, "topk_group": 8}, "'n_group'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "sigmoid", "num_experts_per_tok": 6},
            "'sigmoid'",
        ),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    found = reasons(V3 | change)
    assert len(found) == 1 and words in found[0]


def test_ranks() -> None:
    found = reasons(V3 | {"first_k_dense_replace": 61, "num_attention_heads": 12, "num_key_value_heads": 12}, 8)
    assert found == ["num_attention_heads 12 does not divide over 8 ranks"]


def test_attention_is_chosen_by_kind(checkpoints: Any) -> None:
    started = launch(EngineConfig(model=str(checkpoints("DeepseekV3ForCausalLM")), dtype="float32", block_size=8))
    chosen = {(c.kind, c.driver) for c in started.start.worker.choices if c.point == "attention"}
    assert chosen == {("mla", "torch_mla")}
    group = started.start.worker.layout.groups[0]
    assert (group.kind, group.head_size, group.rope_size, group.layer_bytes) == ("mla", 48, 16, 8 * 48 * 4)
