"""Nemotron-H (2025) and Nemotron 3: every layer is one block behind one norm, and blocks are of four kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from engine.interfaces.model import ModelContext, State
from engine.modeling import Embedding, Linear, Module, RMSNorm
from engine_kit.model_config import Config, flag, integer, number
from engine_kit.routing import ExpertAct, ExpertSpec
from engine_models.experts import expert_layer
from engine_models.layers import MLP, DecoderModel, self_attention
from engine_models.nemotron_h_card import ATTENTION, DENSE, MIXER, NemotronH
from engine_moe.layers import ExpertRouter
from engine_states.layers import Mamba2Mixer

_MTP = "mtp."
"""What names of the layers for further tokens begin with."""


class BlockLayer(Module):
    """norm, block; its output is added to the residual by the norm that follows.

    Args:
        placed: the block is given positions, too.
    """

    def __init__(self, norm: RMSNorm, block: Callable[..., torch.Tensor], placed: bool) -> None:
        self.norm = norm
        self.block = block
        self.placed = placed

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        hidden, state["residual"] = self.norm.add(state["hidden"], state.get("residual"))
        state["hidden"] = self.block(hidden, state["positions"]) if self.placed else self.block(hidden)


class LatentExperts(Module):
    """shared(x) + out(sum of the chosen experts of in(x)); `in` and `out`, where the config has them, make the vectors
    that experts read and give smaller. name: the checkpoint's, e.g. "backbone.layers.2.mixer"."""

    def __init__(self, context: ModelContext, config: Config, name: str) -> None:
        size, act, bias = context.description.hidden_size, NemotronH.act(config), flag(config, "mlp_bias", False)
        self._ops: Any = context.ops
        routing, count = NemotronH.routing, NemotronH.routing.num_experts(config)
        chosen_by = f"{name}.gate.e_score_correction_bias"
        self.router = ExpertRouter(context, size, count, routing.form(config), f"{name}.gate", chosen_by)
        latent, inner = integer(config, "moe_latent_size", size), integer(config, "moe_intermediate_size")
        self.first = None
        self.last = None
        if config.get("moe_latent_size") is not None:
            self.first = Linear(context, size, [latent], [f"{name}.fc1_latent_proj"], bias, kind="linear")
            self.last = Linear(context, latent, [size], [f"{name}.fc2_latent_proj"], bias, kind="linear")
        first, last = (f"{name}.experts.{{}}.{part}_proj" for part in ("up", "down"))
        plain = ExpertAct("relu2" if act == "relu2" else "relu", gated=False)
        self.experts = expert_layer(context, ExpertSpec(count, latent, inner, plain, (first,), last))
        up, down = (f"{name}.shared_experts.{part}_proj" for part in ("up", "down"))
        self.shared = MLP(context, size, integer(config, "moe_shared_expert_intermediate_size"), up, down, act, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        ids, weights = self.router(x)
        routed = self.experts(x if self.first is None else self.first(x), ids, weights)
        return self._ops.add(routed if self.last is None else self.last(routed), self.shared(x))


class NemotronHModel(DecoderModel):
    """NemotronHForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, NemotronH.filled(context.description.config)
        size, eps = model.hidden_size, number(config, "layer_norm_epsilon", 1e-5)
        inner, bias = integer(config, "intermediate_size"), flag(config, "mlp_bias", False)
        form, types = NemotronH.mixer(config), NemotronH.types(config)

        def layer(context: ModelContext, index: int) -> Module:
            name, kind = f"backbone.layers.{index}.mixer", types[index]
            if kind == MIXER:
                block: Callable[..., torch.Tensor] = Mamba2Mixer(context, index, form, name)
            elif kind == ATTENTION:
                block = self_attention(context, index, None, name)
            elif kind == DENSE:
                act = NemotronH.act(config)
                block = MLP(context, size, inner, f"{name}.up_proj", f"{name}.down_proj", act, bias)
            else:
                block = LatentExperts(context, config, name)
            norm = RMSNorm(context, size, eps, f"backbone.layers.{index}.norm")
            return BlockLayer(norm, block, placed=kind == ATTENTION)

        embed = Embedding(context, model.vocab_size, size, "backbone.embeddings")
        norm = RMSNorm(context, size, eps, "backbone.norm_f")
        super().__init__(context, layer, norm, tied=False, embed=embed)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; layers that predict further tokens are passed over."""
        super().load_weights((name, tensor) for name, tensor in weights if not name.startswith(_MTP))
