"""Falcon-H1 (TII 2025): in every layer attention and Mamba-2's mixer read the same and are added; numbers of the config
multiply what all parts read or give."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Attention, GatedMLP, Module, RMSNorm
from engine_kit.model_config import Config, flag, head_dim, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.falcon_h1_card import FalconH1
from engine_models.hybrid_card import factors
from engine_models.layers import DecoderModel, PreNormLayer, ScaledEmbedding, self_attention
from engine_states.layers import Mamba2Mixer


class SideBySide(Module):
    """out_a * attention(in_a * x) + out_m * mixer(in_m * x).

    Args:
        by: in_a, out_a, in_m, out_m.
    """

    def __init__(
        self, context: ModelContext, attention: Attention, mixer: Mamba2Mixer, by: tuple[float, float, float, float]
    ) -> None:
        self._ops = context.ops
        self._by = by
        self.attention = attention
        self.mixer = mixer

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], positions int64 [T] -> [T, hidden_size]."""
        ops, (in_a, out_a, in_m, out_m) = self._ops, self._by
        attended = ops.scale(self.attention(ops.scale(x, in_a), positions), out_a)
        return ops.add(attended, ops.scale(self.mixer(ops.scale(x, in_m)), out_m))


class ScaledMLP(GatedMLP):
    """by[1] * down(silu(by[0] * gate(x)) * up(x)); other arguments as `GatedMLP`'s."""

    def __init__(
        self, context: ModelContext, size: int, inner: int, name: str, bias: bool, by: tuple[float, ...]
    ) -> None:
        super().__init__(context, size, inner, name, bias)
        self._join = context.ops.join  # type: ignore[attr-defined]
        self._by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        inner = self._ops.silu_mul(self._join((self._ops.scale(gate, self._by[0]), up)))
        return self._ops.scale(self.down(inner), self._by[1])


class FalconH1Model(DecoderModel):
    """FalconH1ForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, FalconH1.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps")
        bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
        rotary, form = make_rotary(context, read_rope(config, head_dim(config))), FalconH1.mixer(config)
        # What multiplies keys multiplies scores.
        scale = head_dim(config) ** -0.5 * number(config, "key_multiplier", 1.0)
        parts, mlp_by = _parts(config), factors(config, "mlp_multipliers", 2)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            attention = self_attention(
                context, index, rotary, f"{name}.self_attn", qkv_bias=bias, o_bias=bias, scale=scale
            )
            mixer = Mamba2Mixer(context, index, form, f"{name}.mamba")
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                SideBySide(context, attention, mixer, parts),
                RMSNorm(context, size, eps, f"{name}.pre_ff_layernorm"),
                ScaledMLP(context, size, inner, f"{name}.feed_forward", mlp_bias, mlp_by),
            )

        factor = number(config, "embedding_multiplier", 1.0)
        embed = ScaledEmbedding(context, model.vocab_size, size, "model.embed_tokens", factor)
        norm = RMSNorm(context, size, eps, "model.final_layernorm")
        super().__init__(context, layer, norm, tied(config, False), embed)
        self._scale = number(config, "lm_head_multiplier", 1.0)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size], times `lm_head_multiplier`."""
        return self.context.ops.scale(super().logits(hidden), self._scale)


def _parts(config: Config) -> tuple[float, float, float, float]:
    """See `SideBySide`."""
    keys = ("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")
    in_a, out_a, in_m, out_m = (number(config, key, 1.0) for key in keys)
    return in_a, out_a, in_m, out_m
