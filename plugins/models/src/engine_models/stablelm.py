"""StableLM (Stability AI 2024): Llama's form with layer norms, and rotary positions of a quarter of each head."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.layers import DecoderModel, ParallelLayer, PreNormLayer, self_attention
from engine_models.stablelm_card import StableLm


class StableLmModel(DecoderModel):
    """StableLmForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, StableLm.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_eps")
        bias, parallel = flag(config, "use_qkv_bias", False), flag(config, "use_parallel_residual", False)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            before = LayerNorm(context, size, eps, f"{name}.input_layernorm")
            attention = self_attention(context, index, rotary, f"{name}.self_attn", qkv_bias=bias)
            mlp = GatedMLP(context, size, inner, f"{name}.mlp")
            if parallel:
                return ParallelLayer(context, before, attention, mlp)
            behind = LayerNorm(context, size, eps, f"{name}.post_attention_layernorm")
            return PreNormLayer(context, before, attention, behind, mlp)

        super().__init__(context, layer, LayerNorm(context, size, eps, "model.norm"), tied(config, False))
