"""What "dummy:0.6B" means: the dimensions of published models, and any others. Torch-free."""

from __future__ import annotations

from typing import Any

from engine.types.errors import ModelNotFoundError

PREFIX = "dummy:"
LEAST_VOCABULARY = 258
"""What the tokenizer beside this file has: the bytes, and two tokens for beginning and end."""
_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}
_PRESETS: dict[str, tuple[int, int, int, int, int, int, int, int, bool]] = {
    # layers, hidden, inner, heads, kv heads, head size, vocabulary, positions, tied embeddings; Qwen3's own but "tiny"
    "tiny": (2, 64, 128, 4, 2, 16, 512, 2048, True),
    "0.6B": (28, 1024, 3072, 16, 8, 128, 151936, 40960, True),
    "1.7B": (28, 2048, 6144, 16, 8, 128, 151936, 40960, True),
    "4B": (36, 2560, 9728, 32, 8, 128, 151936, 40960, True),
    "8B": (36, 4096, 12288, 32, 8, 128, 151936, 40960, False),
    "llama-8B": (32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
}
_LLAMA = "llama-"
"""Begins the sizes of Llama 3.1; the others are Qwen3's."""


_LATENT_KEYS = {
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
_LATENT_PRESETS: dict[str, tuple[int, ...]] = {
    # layers, hidden, inner, heads, latent, rotated, not rotated, values, vocabulary, positions
    "mla-tiny": (2, 64, 128, 4, 32, 16, 16, 16, 512, 2048),
    "mla-2.6B": (27, 2048, 10944, 16, 512, 64, 128, 128, 102400, 32768),  # DeepSeek-V2-Lite's own
}
_LATENT_ARCHITECTURE = "DeepseekV3ForCausalLM"


def _latent_config(config: dict[str, Any]) -> dict[str, Any]:
    """The whole config of a made-up model with latent attention: DeepSeek's dimensions, with dense layers alone."""
    return config | {
        "architectures": [_LATENT_ARCHITECTURE],
        "model_type": "deepseek_v3",
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": None,
        "n_routed_experts": None,
        "first_k_dense_replace": config["num_hidden_layers"],
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _shapes_of_latent_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
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


def config_of(name: str) -> dict[str, Any]:
    """config.json of "dummy:SIZE" or "dummy:SIZE,KEY=NUMBER,...", a Qwen3, Llama or DeepSeek-V3 in bfloat16.

    Raises ModelNotFoundError for an unknown size or key, or a number that makes no model.
    """
    size, *changes = name.removeprefix(PREFIX).split(",")
    latent = size in _LATENT_PRESETS
    if size not in _PRESETS and not latent:
        sizes = (*_PRESETS, *_LATENT_PRESETS)
        raise _refused(name, f"there is no size {size!r}", f"the sizes are {', '.join(sizes)}")
    keys = _LATENT_KEYS if latent else _KEYS
    numbers = _LATENT_PRESETS[size] if latent else _PRESETS[size][:-1]
    config: dict[str, Any] = dict(zip(keys.values(), numbers, strict=True))
    for change in changes:
        key, _, text = change.partition("=")
        if key not in keys:
            raise _refused(name, f"there is no {key!r} to change", f"what can be changed: {', '.join(keys)}")
        if not text.isdecimal() or int(text) < 1:
            raise _refused(name, f"{key} is {text!r}", "write a whole number from 1")
        config[keys[key]] = int(text)
    if not latent and config["num_attention_heads"] % config["num_key_value_heads"]:
        raise _refused(name, "kv_heads does not divide heads", "choose heads as a multiple of kv_heads")
    rotated = "rope" if latent else "head_dim"
    if config[keys[rotated]] % 2:
        raise _refused(name, f"{rotated} is odd", "rotary positions need an even one")
    if config["vocab_size"] < LEAST_VOCABULARY:
        raise _refused(name, f"the tokenizer has {LEAST_VOCABULARY} tokens", f"vocab is {LEAST_VOCABULARY} or more")
    common = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "dtype": "bfloat16",
    }
    if latent:
        return _latent_config(config) | common
    return (
        config
        | common
        | {
            "architectures": ["LlamaForCausalLM" if size.startswith(_LLAMA) else "Qwen3ForCausalLM"],
            "model_type": "llama" if size.startswith(_LLAMA) else "qwen3",
            "rope_theta": 500000.0 if size.startswith(_LLAMA) else 1000000.0,
            "tie_word_embeddings": _PRESETS[size][-1],
        }
    )


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape by its name, in the order of a published checkpoint's layers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    latent = _LATENT_ARCHITECTURE in config["architectures"]
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        **(_shapes_of_latent_attention(config) if latent else _shapes_of_attention(config)),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _shapes_of_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    norms = {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if config["model_type"] == "qwen3" else {}
    return {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        **norms,
    }


def _refused(name: str, found: str, remedy: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"open model {name!r}", found, remedy)
