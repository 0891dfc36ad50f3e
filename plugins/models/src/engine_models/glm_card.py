"""The cards of ChatGLM and GLM-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import integer, number
from engine_models.decoder_card import DecoderCard


class Glm(DecoderCard):
    """GlmForCausalLM: GLM-4-9B (2024). Half of each head is rotated, in neighbouring pairs."""

    body = "engine_models.glm:GlmModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 0.00000015625,
        "num_key_value_heads": 2,
    }
    default_head_dim = 128
    partial = True


class Glm4(Glm):
    """Glm4ForCausalLM: GLM-4-0414 (2025). What the blocks give is normed too."""

    body = "engine_models.glm:Glm4Model"


class ChatGLM(DecoderCard):
    """ChatGLMModel, ChatGLMForConditionalGeneration: ChatGLM2 and 3 (2023), and GLM-4-9B as it was first published."""

    body = "engine_models.glm:ChatGLMModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "multi_query_attention": False,
        "layernorm_epsilon": 1e-5,
        "rmsnorm": True,
        "post_layer_norm": True,
    }
    foreign: ClassVar[Mapping[str, Any]] = {
        "multi_query_attention": True,
        "rmsnorm": True,
        "post_layer_norm": True,
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        "pre_seq_len": None,
        "quantization_bit": 0,
        "vision_config": None,
    }
    partial = True

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """ChatGLM has names of its own; half of each head is rotated, and `rope_ratio` stretches the base."""
        theta = 10000 * number(config, "rope_ratio", 1.0)
        return {
            **super().filled(config),
            "vocab_size": integer(config, "padded_vocab_size"),
            "num_hidden_layers": integer(config, "num_layers"),
            "num_key_value_heads": integer(config, "multi_query_group_num", 1),
            "head_dim": integer(config, "kv_channels", 128),
            "intermediate_size": integer(config, "ffn_hidden_size"),
            "max_position_embeddings": integer(config, "seq_length", 2048),
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5},
        }
