"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): parallel blocks with a norm each."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Embedding, Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.gpt_neox_card import GPTNeoX
from engine_models.grouped_qkv import in_order
from engine_models.layers import MLP, DecoderModel, ParallelLayer, PreNormLayer, self_attention


class GPTNeoXModel(DecoderModel):
    """GPTNeoXForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, GPTNeoX.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_eps")
        bias, parallel = flag(config, "attention_bias", True), flag(config, "use_parallel_residual", True)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"gpt_neox.layers.{index}"
            before, behind = (
                LayerNorm(context, size, eps, f"{name}.{part}_layernorm") for part in ("input", "post_attention")
            )
            attention = self_attention(
                context,
                index,
                rotary,
                f"{name}.attention",
                parts=("query_key_value",),
                out="dense",
                qkv_bias=bias,
                o_bias=bias,
            )
            up, down = f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
            mlp = MLP(context, size, inner, up, down, GPTNeoX.act(config))
            if parallel:
                return ParallelLayer(context, before, attention, mlp, behind)
            return PreNormLayer(context, before, attention, behind, mlp)

        norm = LayerNorm(context, size, eps, "gpt_neox.final_layer_norm")
        embed = Embedding(context, model.vocab_size, size, "gpt_neox.embed_in")
        super().__init__(context, layer, norm, tied(config, False), embed, head="embed_out")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; each head's queries, keys and values stand together in the checkpoint."""
        head_size = self.context.description.kv_specs[0].head_size
        super().load_weights(in_order(weights, ".attention.query_key_value", 1, head_size))
