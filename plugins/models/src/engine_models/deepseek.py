"""DeepSeek's decoders, V2 and V3 (2024): pre-norm layers of latent attention, the first ones with gated feed-forward
blocks, the others with routed experts beside shared ones.

They differ in routing, and V3's config may say that rotary pairs are in halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import (
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    ModelBody,
    Module,
    RMSNorm,
    Rotary,
    Stack,
    narrowed,
)
from engine.types.errors import UnsupportedModelError
from engine_kit.latent_attention import LatentAttention
from engine_kit.model_config import Config, RopeConfig, flag, integer, number, read_rope, rope_parameters
from engine_kit.rotary import make_rotary
from engine_models.deepseek_card import DeepseekMTP, DeepseekV2, DeepseekV3
from engine_models.experts import routed_experts, without_layers
from engine_models.layers import Block


class DeepseekLayer(Module):
    """norm, attention, norm, feed-forward; each block's output is added to the residual by the norm that follows."""

    def __init__(
        self,
        context: ModelContext,
        index: int,
        rotary: Rotary,
        scale: float,
        interleaved: bool,
        block: Block,
        prefix: str,
    ) -> None:
        model, config = context.description, context.description.config
        spec, eps = model.kv_specs[index], number(config, "rms_norm_eps", 1e-6)
        self._ops = context.ops
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
        self.mlp = block

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        hidden, residual = self.attention_norm.add(state["hidden"], state.get("residual"))
        hidden, residual = narrowed(self._ops, state, self.attention(hidden, state["positions"]), residual)
        hidden, residual = self.mlp_norm.add(hidden, residual)
        state["hidden"], state["residual"] = self.mlp(hidden), residual


class DeepseekV2Model(Decoder):
    """DeepseekV2ForCausalLM."""

    card: Any = DeepseekV2

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model, config = context.description, context.description.config
        rope = read_rope(config, model.kv_specs[0].rope_size)
        rotary = make_rotary(context, rope)
        scale = scale_of(config, rope)
        interleaved = self.interleaved(config)
        self.embed = Embedding(context, model.vocab_size, model.hidden_size, "model.embed_tokens")

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            block = feed_forward(context, self.card, index, f"{name}.mlp")
            return DeepseekLayer(context, index, rotary, scale, interleaved, block, name)

        self.layers = Stack(context, model.num_layers, layer)
        self.norm = RMSNorm(context, model.hidden_size, number(config, "rms_norm_eps", 1e-6), "model.norm")
        tied = self.embed if flag(config, "tie_word_embeddings", False) else None
        self.head = LMHead(context, model.vocab_size, model.hidden_size, "lm_head", tied)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `Decoder.load_weights`; layers behind the last one, which predict further tokens, are passed over."""
        model = self.context.description
        super().load_weights(without_layers(weights, model.config, model.num_layers))

    @staticmethod
    def interleaved(config: Config) -> bool:
        """Whether the checkpoint's rotary pairs are neighbours."""
        return True


class DeepseekV3Model(DeepseekV2Model):
    """DeepseekV3ForCausalLM."""

    card = DeepseekV3

    @staticmethod
    def interleaved(config: Config) -> bool:
        """`rope_interleave`, true where the config is silent."""
        return flag(config, "rope_interleave", True)


class DeepseekMTPModel(ModelBody):
    """DeepSeekMTPModel: the layer behind the last one of DeepseekV3ForCausalLM, which predicts one token further.

    It reads the target's final state at a position and the token that follows, both normed: eh_proj([embedding; state])
    enters the layer. What leaves that is normed, for the target's head, and as the state from which it goes on.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        if context.target is None:
            found = "it is a layer of another model, for which it drafts"
            raise UnsupportedModelError("serve DeepSeekMTPModel", found, "serve that model with --drafter mtp")
        model, config = context.description, context.description.config
        size, eps = model.hidden_size, number(config, "rms_norm_eps", 1e-6)
        rope = read_rope(config, model.kv_specs[0].rope_size)
        index = integer(config, "num_hidden_layers")
        self._name = f"model.layers.{index}"
        self.embed_norm = RMSNorm(context, size, eps, f"{self._name}.enorm")
        self.state_norm = RMSNorm(context, size, eps, f"{self._name}.hnorm")
        self.join = Linear(context, 2 * size, [size], [f"{self._name}.eh_proj"], bias=False)
        self.layers = [
            DeepseekLayer(
                context,
                0,
                make_rotary(context, rope),
                scale_of(config, rope),
                DeepseekV3Model.interleaved(config),
                feed_forward(context, DeepseekMTP, index, f"{self._name}.mlp"),
                self._name,
            )
        ]
        self.norm = RMSNorm(context, size, eps, f"{self._name}.shared_head.norm")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Of the target's tensors those of the layer."""
        super().load_weights((name, tensor) for name, tensor in weights if name.startswith(f"{self._name}."))

    def tolerated(self) -> frozenset[str]:
        """Its copies of the target's embedding and head."""
        return frozenset({f"{self._name}.embed_tokens.weight", f"{self._name}.shared_head.head.weight"})

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """What follows the states in `features` [T, hidden_size] and `token_ids`, the tokens behind them: [T, H]."""
        target: Any = self.context.target
        embedded = self.embed_norm(target.embed(state["token_ids"]))
        state["hidden"] = self.join(torch.cat((embedded, self.state_norm(state["features"])), dim=-1))
        for layer in walk(self.layers, state):
            layer(state)
        hidden, _ = self.norm.add(state["hidden"], state["residual"])
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's."""
        assert self.context.target is not None
        return self.context.target.logits(hidden)


def feed_forward(context: ModelContext, card: Any, index: int, name: str) -> Block:
    """A layer's feed-forward block.

    index: the layer's in the checkpoint. name: the block's, e.g. "model.layers.0.mlp".
    """
    size, config = context.description.hidden_size, card.filled(context.description.config)
    if index not in card.sparse(config):
        bias = card.mlp_bias and flag(config, "mlp_bias", False)
        return GatedMLP(context, size, integer(config, "intermediate_size"), name, bias)
    inner = integer(config, "moe_intermediate_size") * integer(config, "n_shared_experts")
    shared = GatedMLP(context, size, inner, f"{name}.shared_experts")
    chosen_by = "gate.e_score_correction_bias" if card.routing.form(config).sigmoid else None
    return routed_experts(context, card.routing, config, name, bias=chosen_by, shared=shared)


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
