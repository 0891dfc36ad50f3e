"""The table that drives the tests: a model more is a row more."""

from __future__ import annotations

from typing import Any

BOTH_TYPES = ["sliding_attention", "full_attention"]
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

ALONE: dict[str, dict[str, Any]] = {
    "OlmoForCausalLM": {"clip_qkv": 0.5},
    "HeliumForCausalLM": {},
    "ArceeForCausalLM": TOKENS,
    "ApertusForCausalLM": {},
    "Ernie4_5ForCausalLM": {"use_bias": True},
    "CwmForCausalLM": {"sliding_window": 5, "layer_types": BOTH_TYPES},
    "MinistralForCausalLM": {"sliding_window": 5, "layer_types": BOTH_TYPES},
    "NanoChatForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {},
    "Jais2ForCausalLM": {},
    "VaultGemmaForCausalLM": {"sliding_window": 5, "layer_types": BOTH_TYPES},
    "PersimmonForCausalLM": {},
    "BioGptForCausalLM": {},
    "GPTBigCodeForCausalLM": {},
    "HyperCLOVAXForCausalLM": {},
    "BitNetForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {"moe_k": 2, "moe_num_experts": 4},
    "FlexOlmoForCausalLM": {},
    "MiniMaxM2ForCausalLM": {},
}
"""Architectures that no other driver serves -> what their small config has beside the suite's own."""

SERVED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 10, "sliding_window": 5, "layer_types": BOTH_TYPES},
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True},
    "CohereForCausalLM": {},
    "GPT2LMHeadModel": {},
    "OPTForCausalLM": {},
}
"""The same of some that others serve too."""

DIVIDED = frozenset(
    {
        *("OlmoForCausalLM", "HeliumForCausalLM", "ArceeForCausalLM", "ApertusForCausalLM", "Ernie4_5ForCausalLM"),
        *("CwmForCausalLM", "MinistralForCausalLM", "NanoChatForCausalLM", "Jais2ForCausalLM", "VaultGemmaForCausalLM"),
        *("HyperCLOVAXForCausalLM", "LlamaForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM"),
    }
)
"""Those that transformers has a plan for, by which they are divided over ranks. The plans of the others divide experts,
or are not there."""
