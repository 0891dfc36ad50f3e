"""gpt-oss (OpenAI 2025): attention with a sink for each head and windows in every other layer; all layers have routed
experts, with biases and a clamped gate."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Module, Param, RMSNorm
from engine.modeling.parallel import even
from engine_kit.model_config import flag, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.experts import routed_experts
from engine_models.gpt_oss_card import GptOss
from engine_models.layers import DecoderModel, PreNormLayer, self_attention


class Sinks(Module):
    """A score more for each query head of this rank, in float32.

    Args:
        heads: of the whole model.
        name: the checkpoint's.
    """

    def __init__(self, context: ModelContext, heads: int, name: str) -> None:
        own = even(heads, context, name)
        self._param = Param(name, (heads,), self, pieces=((own.part,),))
        self.tensor = torch.zeros(own.length, dtype=torch.float32, device=context.device)

    def params(self) -> list[Param]:
        """The tensor."""
        return [self._param]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy it to where attention reads it."""
        self.tensor.copy_(tensor)


class SinkLayer(PreNormLayer):
    """A layer that has the sinks of its attention."""

    sinks: Sinks


class GptOssModel(DecoderModel):
    """GptOssForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, GptOss.filled(context.description.config)
        size, eps, bias = model.hidden_size, number(config, "rms_norm_eps"), flag(config, "attention_bias", True)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            attention = f"{name}.self_attn"
            sinks = Sinks(context, model.num_q_heads, f"{attention}.sinks")
            whole = SinkLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, attention, qkv_bias=bias, o_bias=bias, sinks=sinks.tensor),
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                routed_experts(
                    context,
                    GptOss,
                    config,
                    f"{name}.mlp",
                    router="router",
                    bias="router.bias",
                    parts=("experts.gate_up_proj", "experts.down_proj"),
                    stacked="turned",
                    expert_bias=True,
                    act=GptOss.clamped(config),
                ),
            )
            whole.sinks = sinks
            return whole

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False))
