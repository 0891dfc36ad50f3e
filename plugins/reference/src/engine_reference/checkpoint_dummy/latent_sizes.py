"""Made-up models with latent attention: DeepSeek's dimensions, with dense layers alone. Torch-free."""

from __future__ import annotations

from typing import Any

KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "latent": "kv_lora_rank",
    "rope": "qk_rope_head_dim",
    "nope": "qk_nope_head_dim",
    "v_dim": "v_head_dim",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}
PRESETS: dict[str, tuple[int, ...]] = {
    # layers, hidden, inner, heads, latent, rotated, not rotated, values, vocabulary, positions
    "mla-tiny": (2, 64, 128, 4, 32, 16, 16, 16, 512, 2048),
    "mla-2.6B": (27, 2048, 10944, 16, 512, 64, 128, 128, 102400, 32768),  # DeepSeek-V2-Lite's own
}
ARCHITECTURE = "DeepseekV3ForCausalLM"


def finished(config: dict[str, Any]) -> dict[str, Any]:
    """The whole config of these sizes."""
    return config | {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v3",
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": None,
        "n_routed_experts": None,
        "first_k_dense_replace": config["num_hidden_layers"],
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def shapes_of_layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What stands in the place of the projections of a plain layer's attention."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    return {
        "self_attn.q_proj": (heads * (nope + rope), hidden),
        "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (nope + value), latent),
        "self_attn.o_proj": (hidden, heads * value),
    }
