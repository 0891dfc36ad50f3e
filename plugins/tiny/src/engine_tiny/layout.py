"""What every file in the model folder must agree on: special tokens, their ids, the small JSON files.

The tokenizer, the trainer and the template all name the same few tokens; one list here keeps them together.
"""

from typing import Any

BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
TOOL_CALL, TOOL_CALL_END, TOOLS, TOOLS_END = "<tool_call>", "</tool_call>", "<tools>", "</tools>"

CONTROL_TOKENS = (BOS, EOS, IM_START, IM_END)
"""Marked special: they never appear in decoded text."""

MARKUP_TOKENS = (TOOL_CALL, TOOL_CALL_END, TOOLS, TOOLS_END)
"""One token each, but not special: a reader of tool calls must see them in the decoded text."""

SPECIAL_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS
TOKEN_IDS: dict[str, int] = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
MAX_POSITIONS = 2048


def llama_config(
    *, vocab_size: int, hidden_size: int, layers: int, heads: int, kv_heads: int, intermediate_size: int
) -> dict[str, Any]:
    """`config.json` of a Llama with tied embeddings, in the form that both transformers 4 and 5 read."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": TOKEN_IDS[BOS],
        "eos_token_id": TOKEN_IDS[IM_END],
        "pad_token_id": TOKEN_IDS[EOS],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def generation_config() -> dict[str, Any]:
    """A turn ends with <|im_end|>, a plain text with <|eos|>: both stop generation. Greedy by default."""
    return {
        "bos_token_id": TOKEN_IDS[BOS],
        "eos_token_id": [TOKEN_IDS[IM_END], TOKEN_IDS[EOS]],
        "pad_token_id": TOKEN_IDS[EOS],
        "do_sample": False,
    }


def tokenizer_config() -> dict[str, Any]:
    """The chat template lies beside this file, as `chat_template.jinja`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": IM_END,
        "pad_token": EOS,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
