"""InternLM2 (Shanghai AI Laboratory 2024), InternLM3 (2025), Seed-OSS (ByteDance 2025), MiniCPM (OpenBMB 2024),
Baichuan (2023).

They compute what Llama does, from checkpoints with other names, biases and multipliers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Embedding, GatedMLP, Module, RMSNorm
from engine.types.errors import UnsupportedModelError
from engine_kit.model_config import Config, flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.alibi import bloom_slopes, on_this_rank
from engine_models.decoder_card import DecoderCard, tied
from engine_models.grouped_qkv import in_order
from engine_models.layers import DecoderModel, PreNormLayer, ScaledEmbedding, self_attention
from engine_models.llama_shaped_card import Baichuan, InternLM2, InternLM3, MiniCPM, SeedOss


class Biases(NamedTuple):
    """Which of a layer's projections have biases."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


class LlamaShapedModel(DecoderModel):
    """Pre-norm layers under Llama's names; `scale` times what each block gives is added."""

    card: type[DecoderCard]
    projections: tuple[str, str, str] | tuple[str] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, context: ModelContext, scale: float = 1.0, embed: Embedding | None = None) -> None:
        model, config = context.description, self.card.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps", 1e-6)
        biases = self.biases(config)
        more = {"parts": self.projections, "qkv_bias": biases.qkv, "o_bias": biases.out, **self.places(context, config)}

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            attention = self_attention(context, index, name=f"{name}.self_attn", **more)
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                attention,
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                GatedMLP(context, size, inner, f"{name}.mlp", biases.mlp),
                scale,
            )

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False), embed)

    @staticmethod
    def biases(config: Config) -> Biases:
        """None."""
        return Biases()

    @staticmethod
    def places(context: ModelContext, config: Config) -> dict[str, Any]:
        """How attention tells places apart: arguments of `self_attention`."""
        return {"rotary": make_rotary(context, read_rope(config, context.description.kv_specs[0].head_size))}


class InternLM3Model(LlamaShapedModel):
    """InternLM3ForCausalLM."""

    card = InternLM3

    @staticmethod
    def biases(config: Config) -> Biases:
        """In InternLM's words, or in those of transformers' config class."""
        bias = flag(config, "bias", flag(config, "mlp_bias", False))
        return Biases(flag(config, "qkv_bias", flag(config, "attention_bias", False)), bias, bias)


class SeedOssModel(LlamaShapedModel):
    """SeedOssForCausalLM."""

    card = SeedOss

    @staticmethod
    def biases(config: Config) -> Biases:
        """Three keys."""
        return Biases(
            flag(config, "attention_bias", True),
            flag(config, "attention_out_bias", False),
            flag(config, "mlp_bias", False),
        )


class MiniCPMModel(LlamaShapedModel):
    """MiniCPMForCausalLM."""

    card = MiniCPM

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, context.description.config
        factor = number(config, "scale_emb", 1.0)
        embed = ScaledEmbedding(context, model.vocab_size, model.hidden_size, "model.embed_tokens", factor)
        super().__init__(context, number(config, "scale_depth", 1.0) / model.num_layers**0.5, embed)
        self._scale = number(config, "dim_model_base", 1.0) / model.hidden_size

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size], times dim_model_base / hidden_size."""
        return self.context.ops.scale(super().logits(hidden), self._scale)


class BaichuanModel(LlamaShapedModel):
    """BaichuanForCausalLM, BaiChuanForCausalLM."""

    card = Baichuan
    projections = ("W_pack",)

    @staticmethod
    def places(context: ModelContext, config: Config) -> dict[str, Any]:
        """Rotary positions (7B), or distances (13B)."""
        if not config["alibi"]:
            return LlamaShapedModel.places(context, config)
        return {"rotary": None, "alibi_slopes": on_this_rank(context, bloom_slopes(context.description.num_q_heads))}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; Baichuan 2 divides each row of the head by its length.

        Raises UnsupportedModelError where that head is stored in a quantised form.
        """
        normed = self.context.description.vocab_size == Baichuan.normed_vocabulary
        super().load_weights(_with_normed_head(weights) if normed else weights)


def _with_normed_head(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name == "lm_head.weight":
            yield name, torch.nn.functional.normalize(tensor.double(), dim=-1)
            continue
        if name.startswith("lm_head."):
            raise UnsupportedModelError(
                f"load {name}",
                "each row of this head is divided by its length, and the checkpoint stores it in a quantised form",
                "use a checkpoint that stores this layer plain",
            )
        yield name, tensor


class InternLM2Model(DecoderModel):
    """InternLM2ForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, InternLM2.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps", 1e-6)
        bias = flag(config, "bias", True)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            attention = self_attention(
                context, index, rotary, f"{name}.attention", parts=("wqkv",), out="wo", qkv_bias=bias, o_bias=bias
            )
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.attention_norm"),
                attention,
                RMSNorm(context, size, eps, f"{name}.ffn_norm"),
                GatedMLP(context, size, inner, f"{name}.feed_forward", parts=("w1", "w3"), down="w2"),
            )

        embed = Embedding(context, model.vocab_size, size, "model.tok_embeddings")
        norm = RMSNorm(context, size, eps, "model.norm")
        super().__init__(context, layer, norm, tied(config, False), embed, head="output")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; each KV head's queries, key and value stand together in the checkpoint."""
        model = self.context.description
        spec = model.kv_specs[0]
        super().load_weights(
            in_order(weights, ".attention.wqkv", model.num_q_heads // spec.num_kv_heads, spec.head_size)
        )


class InternLM2RewardModel(InternLM2Model):
    """InternLM2ForRewardModel."""

    score_name = "v_head"
