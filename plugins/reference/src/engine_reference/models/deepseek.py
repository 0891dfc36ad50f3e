"""DeepSeek's decoders: pre-norm layers of latent attention and gated feed-forward blocks, without routed experts.

DeepSeek-V2 (2024) and V3 (2024) compute the same where all of their layers are dense; V3's config may say that rotary
pairs are in halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from engine.interfaces.model import ModelContext, State
from engine.modeling import Decoder, Embedding, GatedMLP, LatentAttention, LMHead, Module, RMSNorm, Rotary, Stack
from engine.modeling.config import Config, RopeConfig, flag, integer, number, read_rope, rope_parameters


class DeepseekLayer(Module):
    """norm, attention, norm, feed-forward; each block's output is added to the residual by the norm that follows."""

    def __init__(
        self, context: ModelContext, index: int, rotary: Rotary, scale: float, interleaved: bool, mlp_bias: bool
    ) -> None:
        model, config = context.description, context.description.config
        spec, prefix, eps = model.kv_specs[index], f"model.layers.{index}", number(config, "rms_norm_eps", 1e-6)
        self.attention_norm = RMSNorm(context, model.hidden_size, eps, f"{prefix}.input_layernorm")
        self.attention = LatentAttention(
            context,
            index,
            hidden_size=model.hidden_size,
            num_heads=model.num_q_heads,
            q_lora_rank=q_lora_rank(config),
            kv_lora_rank=spec.head_size - spec.rope_size,
            nope_size=integer(config, "qk_nope_head_dim", 128),
            rope_size=spec.rope_size,
            v_size=integer(config, "v_head_dim", 128),
            rotary=rotary,
            name=f"{prefix}.self_attn",
            bias=flag(config, "attention_bias", False),
            interleaved=interleaved,
            scale=scale,
        )
        self.mlp_norm = RMSNorm(context, model.hidden_size, eps, f"{prefix}.post_attention_layernorm")
        inner = integer(config, "intermediate_size")
        self.mlp = GatedMLP(context, model.hidden_size, inner, f"{prefix}.mlp", mlp_bias)

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        hidden, residual = self.attention_norm.add(state["hidden"], state.get("residual"))
        hidden = self.attention(hidden, state["positions"])
        hidden, residual = self.mlp_norm.add(hidden, residual)
        state["hidden"], state["residual"] = self.mlp(hidden), residual


class DeepseekV2Model(Decoder):
    """DeepseekV2ForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model, config = context.description, context.description.config
        rope = read_rope(config, model.kv_specs[0].rope_size)
        rotary = Rotary(context, rope)
        scale = scale_of(config, rope)
        interleaved, mlp_bias = self.interleaved(config), self.mlp_bias(config)
        self.embed = Embedding(context, model.vocab_size, model.hidden_size, "model.embed_tokens")
        self.layers = Stack(
            context,
            model.num_layers,
            lambda context, index: DeepseekLayer(context, index, rotary, scale, interleaved, mlp_bias),
        )
        self.norm = RMSNorm(context, model.hidden_size, number(config, "rms_norm_eps", 1e-6), "model.norm")
        tied = self.embed if flag(config, "tie_word_embeddings", False) else None
        self.head = LMHead(context, model.vocab_size, model.hidden_size, "lm_head", tied)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `Decoder.load_weights`; layers behind the last one, which predict further tokens, are passed over."""
        super().load_weights(self._of_the_decoder(weights))

    def _of_the_decoder(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.context.description
        more = max(integer(model.config, key, 0, low=0) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
        behind = tuple(f"model.layers.{model.num_layers + index}." for index in range(more))
        return ((name, tensor) for name, tensor in weights if not name.startswith(behind))

    @staticmethod
    def interleaved(config: Config) -> bool:
        """Whether the checkpoint's rotary pairs are neighbours."""
        return True

    @staticmethod
    def mlp_bias(config: Config) -> bool:
        """Whether the feed-forward blocks have biases."""
        return flag(config, "mlp_bias", False)


class DeepseekV3Model(DeepseekV2Model):
    """DeepseekV3ForCausalLM."""

    @staticmethod
    def interleaved(config: Config) -> bool:
        """`rope_interleave`, true where the config is silent."""
        return flag(config, "rope_interleave", True)

    @staticmethod
    def mlp_bias(config: Config) -> bool:
        """It has none."""
        return False


def q_lora_rank(config: Config) -> int | None:
    """The size of the queries' latent; None for null; transformers' own where the config is silent."""
    return None if config.get("q_lora_rank", 1536) is None else integer(config, "q_lora_rank", 1536)


def scale_of(config: Config, rope: RopeConfig) -> float:
    """Of scores: 1 / sqrt of a head's size; stretched positions bring `mscale_all_dim` in, twice.

    transformers 5.23 does so for every kind of scaling but "default"; the number is yarn's.
    """
    size = integer(config, "qk_nope_head_dim", 128) + rope.rotary_dim
    parameters: dict[str, Any] = rope_parameters(config)
    mscale = parameters.get("mscale_all_dim")
    if rope.rope_type == "default" or not mscale or rope.factor <= 1:
        return float(size**-0.5)
    return float(size**-0.5 * (0.1 * mscale * math.log(rope.factor) + 1.0) ** 2)
