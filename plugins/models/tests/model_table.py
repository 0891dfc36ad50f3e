"""The table that drives the tests: a model more is a row more."""

from __future__ import annotations

from typing import Any

BOTH_TYPES = ["sliding_attention", "full_attention"]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0],
}  # fmt: skip
PHIMOE_ROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 64, "short_mscale": 1.2,
    "long_mscale": 1.3, "short_factor": [1.0, 1.3, 1.7, 2.0], "long_factor": [1.0, 2.0, 4.0, 5.0],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5,
}  # fmt: skip

CHATGLM = {
    "padded_vocab_size": 99, "num_layers": 2, "kv_channels": 8, "multi_query_attention": True,
    "multi_query_group_num": 2, "ffn_hidden_size": 48, "seq_length": 64, "layernorm_epsilon": 1e-2, "rope_ratio": 0.01,
    "add_qkv_bias": True,
}  # fmt: skip

DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 4,
}  # fmt: skip

MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 4, "mamba_d_state": 4, "time_step_limit": [0.0, 1e6],
}  # fmt: skip

FALCON_H1 = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9,
    "mlp_multipliers": [1.4, 0.6], "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 1.1],
}  # fmt: skip

ZAMBA2 = {
    "layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 3, "mamba_ngroups": 4,
    "mamba_d_state": 4, "use_shared_attention_adapter": True, "adapter_rank": 4, "use_mem_rope": True,
    "add_bias_linear": True, "num_key_value_heads": 4, "attention_head_dim": 16,
}  # fmt: skip

NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "moe", "full_attention"], "num_hidden_layers": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 4, "ssm_state_size": 4, "time_step_limit": [0.0, 1e6],
    "mlp_bias": True, "use_bias": True, "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 16,
    "routed_scaling_factor": 1.5,
}  # fmt: skip

TABLE: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 10, "sliding_window": 5},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 10, "sliding_window": 5, "layer_types": BOTH_TYPES},
    "PhiForCausalLM": {"qk_layernorm": True},
    "Phi3ForCausalLM": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "PhimoeForCausalLM": {
        "rope_parameters": PHIMOE_ROPE,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,
    },
    "Olmo2ForCausalLM": {"attention_bias": True},
    "Olmo3ForCausalLM": {"sliding_window": 5, "layer_types": BOTH_TYPES},
    "GraniteForCausalLM": {**MULTIPLIERS, "mlp_bias": True},
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Starcoder2ForCausalLM": {"sliding_window": 5},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": {"sliding_window": 5, "layer_types": BOTH_TYPES},
    "StableLmForCausalLM": {"use_qkv_bias": True},
    "GPTNeoXForCausalLM": {},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    "NemotronForCausalLM": {},
    "MixtralForCausalLM": {"sliding_window": 5},
    "OlmoeForCausalLM": {"norm_topk_prob": True},
    "Qwen2MoeForCausalLM": {"mlp_only_layers": [0]},
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True},
    "GptOssForCausalLM": {
        "sliding_window": 5,
        "layer_types": BOTH_TYPES,
        "rope_parameters": YARN,
        "swiglu_limit": 0.7,
    },
    "GraniteMoeForCausalLM": MULTIPLIERS,
    "Glm4MoeForCausalLM": {"use_qk_norm": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0},
    "DeepseekV2ForCausalLM": {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "OPTForCausalLM": {},
    "GPT2LMHeadModel": {},
    "FalconForCausalLM": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "BloomForCausalLM": {},
    "MptForCausalLM": {},
    "Exaone4ForCausalLM": {"sliding_window": 5, "layer_types": BOTH_TYPES},
    "SeedOssForCausalLM": {},
}
"""architecture -> what its small config has beside the suite's own."""

WITHOUT_ORACLE: dict[str, dict[str, Any]] = {
    "InternLM2ForCausalLM": {"bias": True},
    "InternLM2ForRewardModel": {"bias": True},
    "InternLM3ForCausalLM": {"qkv_bias": True, "bias": True},
    "MiniCPMForCausalLM": {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 8},
    "BaichuanForCausalLM": {"max_position_embeddings": None, "model_max_length": 64},
    "BaiChuanForCausalLM": {},
    "ChatGLMModel": CHATGLM,
    "ChatGLMForConditionalGeneration": CHATGLM,
}
"""The same of those that transformers has no class of: `test_llama_shaped.py` holds them against others that it has."""

WITH_STATES: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {"use_bias": True},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 4, "time_step_limit": [0.0, 1e6]},
    "BambaForCausalLM": {**MAMBA2, "attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {**MAMBA2, **FALCON_H1, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_proj_bias": True},
    "Zamba2ForCausalLM": ZAMBA2,
    "NemotronHForCausalLM": NEMOTRON_H,
    "Qwen3NextForCausalLM": {**DELTA, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0]},
}
"""The same of those whose layers keep states: `test_greedy.py` drafts with them, and divides them, too."""

POOLED: dict[str, dict[str, Any]] = {
    "Gemma2Model": {"query_pre_attn_scalar": 10, "sliding_window": 5},
    "Gemma2ForSequenceClassification": {"query_pre_attn_scalar": 10, "sliding_window": 5},
}
"""The same of decoders whose hidden states are pooled."""

JINA = {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "hidden_act": "gelu"}

MODERN = {
    "local_attention": 6,
    "layer_types": [*BOTH_TYPES, "sliding_attention"],
    "num_hidden_layers": 3,
    "norm_bias": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
}

ENCODERS: dict[str, dict[str, Any]] = {
    "GteModel": {"type_vocab_size": 1},
    "GteForSequenceClassification": {"type_vocab_size": 0},
    "NewModel": {"type_vocab_size": 1},
    "NewForSequenceClassification": {"type_vocab_size": 1},
    "NomicBertModel": {},
    "JinaBertForMaskedLM": JINA,
    "JinaBertModel": JINA,
    "ModernBertModel": MODERN,
    "ModernBertForSequenceClassification": {**MODERN, "classifier_pooling": "mean", "classifier_bias": True},
    "ModernBertForTokenClassification": MODERN,
}
"""The same of encoders."""

ORACLES = {
    **dict.fromkeys(WITHOUT_ORACLE),
    "NewModel": "GteModel",
    "NewForSequenceClassification": "GteForSequenceClassification",
    **dict.fromkeys(("JinaBertForMaskedLM", "JinaBertModel")),
}
"""Whose class computes the same, where transformers has none of the name; None: `test_encoders.py` and
`test_llama_shaped.py` have the formulas."""

_STACKS = {
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "encoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "scale_embedding": True,
    "decoder_start_token_id": 2,
}
_T5 = {
    "d_kv": 12,
    "d_ff": 48,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "n_positions": 64,
    "decoder_start_token_id": 0,
}
READS_SOUND: dict[str, dict[str, Any]] = {
    "WhisperForConditionalGeneration": {
        "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "encoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "num_mel_bins": 6, "max_source_positions": 7, "max_target_positions": 40,
        "decoder_start_token_id": 2,
    }
}  # fmt: skip
"""The same of those whose encoder reads sound: `test_whisper.py` has their tests."""
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": _STACKS,
    "MBartForConditionalGeneration": _STACKS,
    "MarianMTModel": {**_STACKS, "activation_function": "swish"},
    "T5ForConditionalGeneration": _T5,
    "MT5ForConditionalGeneration": {**_T5, "feed_forward_proj": "gated-gelu"},
}
"""The same of encoder-decoder models: `test_encoder_decoders.py` has their tests."""
