"""Qwen3-Next (2025): three of four layers are gated delta nets, the others attend, with a gate on what comes of it; all
have Qwen2-MoE's experts. Norms are stored less 1, but for those of the gated delta nets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import GatedMLP, Linear, ModelBody, Module, Rotary, RowParallelLinear, narrowed
from engine.modeling.parallel import even, kv_heads
from engine.types.errors import UnsupportedModelError
from engine_kit.model_config import Config, flag, head_dim, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.experts import routed_experts
from engine_models.layers import DecoderModel, OffsetRMSNorm
from engine_models.qwen_moe import Qwen2MoeModel
from engine_models.qwen_next_card import LINEAR, Qwen3Next
from engine_states.delta import GatedDeltaNet

_MTP = "mtp."
"""What names of the layer for further tokens begin with."""


class GatedAttention(Module):
    """Attention whose every element of every head is multiplied by a sigmoid (Qiu et al. 2025).

    Args:
        index: of the model's layer.
        name: the checkpoint's, e.g. "model.layers.3.self_attn".
    """

    def __init__(self, context: ModelContext, index: int, config: Config, rotary: Rotary, name: str) -> None:
        model, eps, bias = context.description, _eps(config), flag(config, "attention_bias", False)
        size = self._size = model.kv_specs[index].head_size
        heads = even(model.num_q_heads, context, f"the query heads of {name}")
        kv = kv_heads(model.kv_specs[index].num_kv_heads, context, f"the KV heads of {name}")
        self._ops: Any = context.ops
        # Each head's query and gate stand together.
        shards = [heads.of_units(2 * size), kv.of_units(size), kv.of_units(size)]
        self._widths = [shard.length for shard in shards]
        names = [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        self.qkv = Linear(context, model.hidden_size, shards, names, bias, kind="linear")
        self.q_norm = OffsetRMSNorm(context, size, eps, f"{name}.q_norm")
        self.k_norm = OffsetRMSNorm(context, size, eps, f"{name}.k_norm")
        self.rotary = rotary
        self.attend = context.attention(index, size**-0.5)
        self.o = RowParallelLinear(context, model.num_q_heads * size, model.hidden_size, f"{name}.o_proj", bias)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], positions int64 [T] -> [T, hidden_size]."""
        both, k, v = self.qkv(x).split(self._widths, dim=-1)
        q, gate = both.unflatten(-1, (-1, 2 * self._size)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (-1, self._size)) for part in (k, v))
        q, k = self.rotary.normed(q, k, self.q_norm, self.k_norm, positions)
        return self.o(self._ops.gate_by(self.attend(q, k, v), self._ops.join((gate,)), silu=False))


class Qwen3NextLayer(Module):
    """norm, mixer, norm, feed-forward; each block's output is added to the residual by the norm that follows.

    Args:
        index: of the model's layer.
        linear: it is a gated delta net; else it attends.
        sparse: it has routed experts.
        name: the checkpoint's, e.g. "model.layers.0".
    """

    def __init__(
        self, context: ModelContext, index: int, config: Config, rotary: Rotary, linear: bool, sparse: bool, name: str
    ) -> None:
        size, eps, block = context.description.hidden_size, _eps(config), f"{name}.mlp"
        self._ops = context.ops
        self.mixer_norm = OffsetRMSNorm(context, size, eps, f"{name}.input_layernorm")
        self.delta = None
        self.attention = None
        if linear:
            self.delta = GatedDeltaNet(context, index, Qwen3Next.delta(config), f"{name}.linear_attn")
        else:
            self.attention = GatedAttention(context, index, config, rotary, f"{name}.self_attn")
        self.mlp_norm = OffsetRMSNorm(context, size, eps, f"{name}.post_attention_layernorm")
        if sparse:
            shared = Qwen2MoeModel.shared(context, config, block)
            self.mlp: Any = routed_experts(context, Qwen3Next, config, block, shared=shared)
        else:
            self.mlp = GatedMLP(context, size, integer(config, "intermediate_size"), block)

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        hidden, residual = self.mixer_norm.add(state["hidden"], state.get("residual"))
        if self.attention is not None:
            hidden = self.attention(hidden, state["positions"])
        elif self.delta is not None:
            hidden = self.delta(hidden)
        hidden, residual = narrowed(self._ops, state, hidden, residual)
        hidden, residual = self.mlp_norm.add(hidden, residual)
        state["hidden"], state["residual"] = self.mlp(hidden), residual


class Qwen3NextModel(DecoderModel):
    """Qwen3NextForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Qwen3Next.filled(context.description.config)
        rotary = make_rotary(context, read_rope(config, head_dim(config, Qwen3Next.default_head_dim)))
        types, sparse = Qwen3Next.types(config), Qwen3Next.sparse(config)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            return Qwen3NextLayer(context, index, config, rotary, types[index] == LINEAR, sparse[index], name)

        norm = OffsetRMSNorm(context, model.hidden_size, _eps(config), "model.norm")
        super().__init__(context, layer, norm, tied(config, False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; the layer for further tokens is passed over."""
        super().load_weights((name, tensor) for name, tensor in weights if not name.startswith(_MTP))


class Qwen3NextMTPModel(ModelBody):
    """Qwen3NextMTP: the layer of a Qwen3NextForCausalLM that predicts one token further.

    It reads the target's final state at a position and the token that follows, both normed: fc([embedding; state])
    enters the layer. What leaves that is normed, for the target's head, and as the state from which it goes on.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        if context.target is None:
            found = "it is a layer of another model, for which it drafts"
            raise UnsupportedModelError("serve Qwen3NextMTP", found, "serve that model with --drafter mtp")
        model, config = context.description, Qwen3Next.filled(context.description.config)
        size, eps = model.hidden_size, _eps(config)
        rotary = make_rotary(context, read_rope(config, head_dim(config, Qwen3Next.default_head_dim)))
        self.embed_norm = OffsetRMSNorm(context, size, eps, "mtp.pre_fc_norm_embedding")
        self.state_norm = OffsetRMSNorm(context, size, eps, "mtp.pre_fc_norm_hidden")
        self.join = Linear(context, 2 * size, [size], ["mtp.fc"], bias=False)
        sparse = Qwen3Next.sparse(config)[0]
        self.layers = [Qwen3NextLayer(context, 0, config, rotary, False, sparse, "mtp.layers.0")]
        self.norm = OffsetRMSNorm(context, size, eps, "mtp.norm")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Of the target's tensors those of the layer."""
        super().load_weights((name, tensor) for name, tensor in weights if name.startswith(_MTP))

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


def _eps(config: Config) -> float:
    return number(config, "rms_norm_eps", 1e-6)
