"""The Llama family: pre-norm decoders with grouped heads, rotary positions and gated feed-forward blocks.

Llama (Touvron et al. 2023), Mistral 7B (Jiang et al. 2023), Qwen2 (2024) and Qwen3 (2025) differ in which projections
have biases, whether queries and keys are normed, and where a sliding window applies. The last is a matter of each
layer's cache and attention, so it does not show here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from engine.interfaces.model import ModelContext, State
from engine.modeling import (
    Attention,
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    Module,
    RMSNorm,
    Rotary,
    Stack,
    narrowed,
)
from engine_kit.few_rows import FewRows
from engine_kit.model_config import Config, flag, integer, number, read_rope
from engine_kit.pooled_decoders import of_pooling_model
from engine_kit.rotary import make_rotary
from engine_kit.rounded_rows import RoundedRows


@dataclass(frozen=True, kw_only=True)
class Features:
    """Where the family's members differ."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class LlamaLayer(Module):
    """norm, attention, norm, feed-forward; each block's output is added to the residual by the norm that follows."""

    def __init__(
        self, context: ModelContext, index: int, rotary: Rotary, eps: float, features: Features, prefix: str
    ) -> None:
        model, config = context.description, context.description.config
        spec, name = model.kv_specs[index], f"{prefix}.self_attn"
        norms = None
        if features.qk_norm:
            norms = tuple(RMSNorm(context, spec.head_size, eps, f"{name}.{part}_norm") for part in "qk")
        self._ops = context.ops
        self.attention_norm = RMSNorm(context, model.hidden_size, eps, f"{prefix}.input_layernorm")
        self.attention = Attention(
            context,
            index,
            hidden_size=model.hidden_size,
            num_q_heads=model.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            rotary=rotary,
            name=name,
            qkv_bias=features.qkv_bias,
            o_bias=features.o_bias,
            norms=norms,
        )
        self.mlp_norm = RMSNorm(context, model.hidden_size, eps, f"{prefix}.post_attention_layernorm")
        inner = integer(config, "intermediate_size")
        self.mlp = GatedMLP(context, model.hidden_size, inner, f"{prefix}.mlp", features.mlp_bias)
        self._few_rows = FewRows(context, self.attention_norm, self.attention, self.mlp_norm, self.mlp)
        self._rounded_rows = RoundedRows(context, self.attention_norm, self.attention, self.mlp_norm, self.mlp)

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        if self._few_rows(state) or self._rounded_rows(state):
            return
        hidden, residual = self.attention_norm.add(state["hidden"], state.get("residual"))
        hidden, residual = narrowed(self._ops, state, self.attention(hidden, state["positions"]), residual)
        hidden, residual = self.mlp_norm.add(hidden, residual)
        state["hidden"], state["residual"] = self.mlp(hidden), residual


class LlamaModel(Decoder):
    """LlamaForCausalLM; LlamaModel and LlamaForSequenceClassification, by what the description says.

    (So it is with the other members of the family.)
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model, config = context.description, context.description.config
        eps, features = number(config, "rms_norm_eps", 1e-6), self.features(config)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))
        self.embed = Embedding(context, model.vocab_size, model.hidden_size, "model.embed_tokens")
        self.layers = Stack(
            context,
            model.num_layers,
            lambda context, index: LlamaLayer(context, index, rotary, eps, features, f"model.layers.{index}"),
        )
        self.norm = RMSNorm(context, model.hidden_size, eps, "model.norm")
        if model.generates:
            tied = self.embed if flag(config, "tie_word_embeddings", False) else None
            self.head = LMHead(context, model.vocab_size, model.hidden_size, "lm_head", tied)
        elif model.pooler.num_labels:
            self.score = self.scorer(model.hidden_size, model.pooler.num_labels)

    def scorer(self, size: int, labels: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head of a model that classifies."""
        return Linear(self.context, size, [labels], ["score"], bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `Decoder.load_weights`; a model that pools takes its weights with and without the prefix "model."."""
        super().load_weights(weights if self.context.description.generates else of_pooling_model(weights))

    @staticmethod
    def features(config: Config) -> Features:
        """What the config asks for."""
        bias = flag(config, "attention_bias", False)
        return Features(qkv_bias=bias, o_bias=bias, mlp_bias=flag(config, "mlp_bias", False))


class MistralModel(LlamaModel):
    """MistralForCausalLM: no biases."""

    @staticmethod
    def features(config: Config) -> Features:
        """Nothing to choose."""
        return Features()


class Qwen2Model(LlamaModel):
    """Qwen2ForCausalLM: biases of queries, keys and values."""

    @staticmethod
    def features(config: Config) -> Features:
        """Nothing to choose."""
        return Features(qkv_bias=True)


class Qwen2RewardModel(Qwen2Model):
    """Qwen2ForRewardModel and Qwen2ForProcessRewardModel: a head of two layers."""

    def scorer(self, size: int, labels: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Linear, relu, linear."""
        return RewardHead(self.context, size, labels)


class RewardHead(Module):
    """hidden [R, size] -> [R, labels]: "score.0", relu, "score.2"."""

    def __init__(self, context: ModelContext, size: int, labels: int) -> None:
        self._ops = context.ops
        self.inner = Linear(context, size, [size], ["score.0"], bias=True)
        self.out = Linear(context, size, [labels], ["score.2"], bias=True)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, size] -> [R, labels]."""
        return self.out(self._ops.relu(self.inner(hidden), False))


class Qwen3Model(LlamaModel):
    """Qwen3ForCausalLM: each head's queries and keys are normed."""

    @staticmethod
    def features(config: Config) -> Features:
        """What the config asks for."""
        bias = flag(config, "attention_bias", False)
        return Features(qkv_bias=bias, o_bias=bias, qk_norm=True)
