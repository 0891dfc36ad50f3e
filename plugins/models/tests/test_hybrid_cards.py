"""What the configs of hybrids say: of their published sizes, and nonsense."""

from __future__ import annotations

from typing import Any

import pytest

from engine.interfaces.model import ModelNeed
from engine.types.parallel import Parallel
from engine_models.bamba_card import Bamba
from engine_models.falcon_h1_card import FalconH1
from engine_models.hybrid_card import HybridCard
from engine_models.jamba_card import Jamba
from engine_models.nemotron_h_card import NemotronH
from engine_models.zamba2_card import Zamba2

BAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 128256, "hidden_size": 4096,
    "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27], "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "max_position_embeddings": 262144, "rope_theta": 10000.0, "rope_scaling": None,
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_groups": 1, "rms_norm_eps": 1e-5, "attn_rotary_emb": 64,
}  # fmt: skip
"""Of Bamba-9B, in version 4's words."""

FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 32784, "hidden_size": 1024,
    "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 2048, "max_position_embeddings": 16384, "rope_theta": 100000000000.0, "rope_scaling": None,
    "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "mamba_norm_before_gate": False, "mamba_rms_norm": False, "rms_norm_eps": 1e-5,
    "ssm_multipliers": [0.35, 0.25, 0.16, 0.5, 0.35], "mlp_multipliers": [0.88, 0.39],
}  # fmt: skip
"""Of Falcon-H1-0.5B."""

JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 65536, "hidden_size": 4096,
    "num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16,
    "num_experts_per_tok": 2, "intermediate_size": 14336, "max_position_embeddings": 262144, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_dt_rank": 256, "mamba_expand": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""Of Jamba v0.1."""

ZAMBA2: dict[str, Any] = {
    "architectures": ["Zamba2ForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 32000, "hidden_size": 2560,
    "num_hidden_layers": 54, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 10240,
    "hidden_act": "gelu", "max_position_embeddings": 4096, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_ngroups": 1, "n_mamba_heads": 80, "mamba_headdim": 64, "attention_head_dim": 160, "num_mem_blocks": 2,
    "attention_hidden_size": 5120, "adapter_rank": 128, "use_shared_attention_adapter": False, "use_mem_rope": True,
    "layers_block_type": ["hybrid" if index in {6, 12, 18, 24, 30, 36, 42, 47, 51} else "mamba" for index in range(54)],
}  # fmt: skip
"""Of Zamba2-2.7B."""

NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 131072, "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "num_hidden_layers": 56,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 15680,
    "max_position_embeddings": 131072, "mlp_hidden_act": "relu2", "mamba_num_heads": 128, "mamba_head_dim": 80,
    "mamba_hidden_act": "silu", "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "sliding_window": None,
    "layer_norm_epsilon": 1e-5, "time_step_min": 0.001, "use_conv_bias": True, "tie_word_embeddings": False,
}  # fmt: skip
"""Of Nemotron-Nano-9B-v2, in version 4's words."""
SPARSE = {**NEMOTRON_H, "hybrid_override_pattern": "MEM*E-"}

CARDS: dict[str, type[HybridCard]] = {
    "BambaForCausalLM": Bamba,
    "FalconH1ForCausalLM": FalconH1,
    "JambaForCausalLM": Jamba,
    "Zamba2ForCausalLM": Zamba2,
    "NemotronHForCausalLM": NemotronH,
}


def reasons(config: dict[str, Any], tp: int = 1) -> list[str]:
    (architecture,) = config["architectures"]
    need = ModelNeed(architecture=architecture, config=config, parallel=Parallel(tp=tp))
    return CARDS[architecture].unsupported(need)


def test_bamba() -> None:
    model = Bamba.describe(BAMBA)
    attends = [site.layer for site in model.sites if site.kind == "full"]
    assert attends == [9, 18, 27] and len(model.sites) == model.num_layers == 32
    assert model.kv_specs[0].states[-1].shape == (128, 128, 64)
    assert reasons(BAMBA) == reasons(BAMBA, 8) == []


def test_falcon_h1() -> None:
    """Each layer has a cache and states."""
    model = FalconH1.describe(FALCON_H1)
    assert [(site.layer, site.kind) for site in model.sites[:4]] == [
        (0, "state"),
        (0, "full"),
        (1, "state"),
        (1, "full"),
    ]
    assert model.num_layers == 36 and model.kv_specs[0].states[-1].shape == (24, 128, 64)
    assert FalconH1.mixer(FALCON_H1).norm == "none"
    assert reasons(FALCON_H1) == reasons(FALCON_H1, 8) == []


def test_jamba() -> None:
    model = Jamba.describe(JAMBA)
    assert [site.layer for site in model.sites if site.kind == "full"] == [4, 12, 20, 28]
    assert model.kv_specs[0].states[-1].shape == (16, 8192) and sum(Jamba.sparse(JAMBA)) == 16
    assert reasons(JAMBA) == reasons(JAMBA, 8) == []
    assert not any(Jamba.sparse({**JAMBA, "num_experts": 1})) and reasons({**JAMBA, "num_experts": 1}) == []


def test_zamba2() -> None:
    """Two blocks take turns."""
    model = Zamba2.describe(ZAMBA2)
    assert len(model.sites) == 54 + 9 and {site.head_size for site in model.sites if site.kind == "full"} == {160}
    assert list(Zamba2.uses(ZAMBA2).items())[:4] == [(6, (6, 0)), (12, (12, 1)), (18, (6, 2)), (24, (12, 3))]
    assert reasons(ZAMBA2) == reasons(ZAMBA2, 8) == []


def test_nemotron_h() -> None:
    """Feed-forward blocks are layers of their own, which keep nothing."""
    model = NemotronH.describe(NEMOTRON_H)
    assert [site.layer for site in model.sites if site.kind == "full"] == [14, 21, 30, 39]
    assert model.num_layers == 56 and len(model.sites) == 31 and model.config == NEMOTRON_H
    assert model.kv_specs[0].states[-1].shape == (128, 128, 80)
    assert reasons(NEMOTRON_H) == reasons(NEMOTRON_H, 8) == reasons(SPARSE, 8) == []
    renamed = {"mamba_n_groups": 4, "n_groups": None}
    old = {key: value for key, value in {**NEMOTRON_H, **renamed}.items() if value is not None}
    assert NemotronH.mixer(NemotronH.filled(old)).groups == 4


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (BAMBA, {"attn_layer_indices": [32]}, "attn_layer_indices"),
        (BAMBA, {"attn_layer_indices": "all"}, "attn_layer_indices"),
        (BAMBA, {"mamba_d_head": 32}, "mamba_n_heads"),
        (BAMBA, {"mamba_n_groups": 3}, "mamba_n_groups"),
        (BAMBA, {"mamba_d_conv": 1}, "mamba_d_conv"),
        (BAMBA, {"time_step_limit": [1]}, "time_step_limit"),
        (BAMBA, {"hidden_act": "gelu"}, "hidden_act"),
        (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset"),
        (JAMBA, {"expert_layer_offset": 2}, "expert_layer_offset"),
        (JAMBA, {"num_experts_per_tok": 17}, "17 of 16 experts"),
        (JAMBA, {"mamba_dt_rank": "big"}, "mamba_dt_rank"),
        (ZAMBA2, {"layers_block_type": ["hybrid"]}, "layers_block_type"),
        (ZAMBA2, {"layers_block_type": ["moe"] * 54}, "'moe' is neither"),
        (ZAMBA2, {"use_long_context": True}, "use_long_context"),
        (ZAMBA2, {"n_mamba_heads": 79}, "n_mamba_heads"),
        (ZAMBA2, {"mamba_ngroups": 3}, "mamba_ngroups"),
        (ZAMBA2, {"attention_hidden_size": 2560}, "attention_hidden_size"),
        (ZAMBA2, {"use_shared_attention_adapter": True, "num_key_value_heads": 8}, "num_key_value_heads"),
        (ZAMBA2, {"use_shared_attention_adapter": True, "attention_head_dim": 80}, "5120 elements"),
        (NEMOTRON_H, {"hybrid_override_pattern": "MX"}, "'X' is none of"),
        (NEMOTRON_H, {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        (NEMOTRON_H, {"layers_block_type": ["moe", "rnn"]}, "'rnn' is none of"),
        (NEMOTRON_H, {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        (NEMOTRON_H, {"attention_bias": True}, "attention_bias"),
        (NEMOTRON_H, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (NEMOTRON_H, {"n_groups": 7}, "n_groups"),
        (SPARSE, {"num_experts_per_tok": 9}, "9 of 8 experts"),
        (SPARSE, {"moe_latent_size": "small"}, "moe_latent_size"),
        (FALCON_H1, {"mamba_d_ssm": 1000}, "mamba_n_heads"),
        (FALCON_H1, {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        (FALCON_H1, {"mlp_multipliers": [1.0, "half"]}, "mlp_multipliers"),
    ],
)
def test_nonsense_is_refused_by_key(config: dict[str, Any], changed: dict[str, Any], said: str) -> None:
    found = reasons({**config, **changed})
    assert any(said in reason for reason in found), found


def test_ranks_that_cannot_share_the_mixers() -> None:
    found = reasons({**BAMBA, "mamba_n_groups": 2}, 4)
    assert found == ["128 heads in 2 groups cannot be divided over 4 ranks"]
