"""Zamba2 (Zyphra 2024): Mamba-2's mixer in every layer, before some of them a transformer block that several share.

A shared block reads the hidden state beside the embedding, of which every layer has it anew; what it gives is added to
what the mixer reads, and to nothing else. Each of its uses has small adapters of its own, which are no LoRA adapters of
requests but a part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import Linear, MergedColumnLinear, Module, RMSNorm, Rotary, RowParallelLinear
from engine.modeling.parallel import even, kv_heads
from engine.types.parallel import Shard
from engine_kit.model_config import Config, flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.layers import DecoderModel
from engine_models.mamba import MixerLayer
from engine_models.zamba2_card import Zamba2
from engine_states.layers import Mamba2Mixer

_PARTS = ("q", "k", "v")


class SharedBlock(Module):
    """The weights that several layers' transformer blocks share. name: the checkpoint's, of the first of them.

    Attributes:
        heads: shards of queries', keys' and values' elements.
        inner: that of the feed-forward block.
    """

    def __init__(self, context: ModelContext, index: int, config: Config, name: str) -> None:
        model, bias = context.description, flag(config, "add_bias_linear", False)
        size, eps = model.hidden_size, number(config, "rms_norm_eps")
        spec = next(site for site in model.sites if site.layer == index and site.kind != "state")
        heads = even(model.num_q_heads, context, f"the query heads of {name}").of_units(spec.head_size)
        kv = kv_heads(spec.num_kv_heads, context, f"the KV heads of {name}").of_units(spec.head_size)
        self.head_size = spec.head_size
        self.heads = [heads, kv, kv]
        attention, mlp = f"{name}.self_attn", f"{name}.feed_forward"
        inner = integer(config, "intermediate_size")
        self.inner = even(inner, context, mlp)
        self.norm = RMSNorm(context, 2 * size, eps, f"{name}.input_layernorm")
        names = [f"{attention}.{part}_proj" for part in _PARTS]
        self.qkv = Linear(context, 2 * size, self.heads, names, bias=False, kind="linear")
        self.o = RowParallelLinear(context, model.num_q_heads * spec.head_size, size, f"{attention}.o_proj")
        self.mlp_norm = RMSNorm(context, size, eps, f"{name}.pre_ff_layernorm")
        self.gate_up = MergedColumnLinear(context, size, [inner, inner], [f"{mlp}.gate_up_proj"], bias)
        self.down = RowParallelLinear(context, inner, size, f"{mlp}.down_proj", bias)


class Adapter(Module):
    """up(down(x)). name: the checkpoint's, of the list; place: in it."""

    def __init__(self, context: ModelContext, size: int, rank: int, outputs: list[Shard], name: str) -> None:
        self.down = Linear(context, size, [rank], [f"{name}.0"], bias=False, kind="linear")
        self.up = Linear(context, rank, outputs, [f"{name}.1"], bias=False, kind="linear")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> [T, outputs of this rank]."""
        return self.up(self.down(x))


class HybridLayer(Module):
    """norm(hidden + linear(block)), mixer; its output is added to the residual, without what the block gave.

    Args:
        index: of the model's layer; `use`: of the shared block by this one, counted over all blocks.
        name: the checkpoint's of the layer; `shared`: of the block.
    """

    def __init__(
        self,
        context: ModelContext,
        index: int,
        config: Config,
        rotary: Rotary | None,
        block: SharedBlock,
        shared: str,
        use: int,
    ) -> None:
        size, rank, name = (
            context.description.hidden_size,
            integer(config, "adapter_rank", 128),
            f"model.layers.{index}",
        )
        self._ops: Any = context.ops
        self._tanh = Zamba2.act(config) == "gelu_tanh"
        self.block = block
        self.rotary = rotary
        self.attend = context.attention(index, (block.head_size / 2) ** -0.5)
        self.adapters: list[Adapter] = []
        if flag(config, "use_shared_attention_adapter", False):
            self.adapters = [
                Adapter(context, 2 * size, rank, [shard], f"{shared}.self_attn.linear_{part}_adapter_list.{use}")
                for part, shard in zip(_PARTS, block.heads, strict=True)
            ]
        gate_up = f"{shared}.feed_forward.gate_up_proj_adapter_list.{use}"
        self.mlp_adapter = Adapter(context, size, rank, [block.inner, block.inner], gate_up)
        self.linear = Linear(context, size, [size], [f"{name}.linear"], bias=False, kind="linear")
        self.norm = RMSNorm(context, size, number(config, "rms_norm_eps"), f"{name}.mamba_decoder.input_layernorm")
        self.mixer = Mamba2Mixer(context, index, Zamba2.mixer(config), f"{name}.mamba_decoder.mamba")

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state; `embedded`, of the same shape, is read."""
        ops, block, total = self._ops, self.block, state["hidden"]
        if (residual := state.get("residual")) is not None:
            total = ops.add(total, residual)
        both = block.norm(ops.join((total, state["embedded"])))
        inner = block.mlp_norm(self._attention(both, state["positions"]))
        gate_up = ops.add(block.gate_up(inner), self.mlp_adapter(inner))
        added = self.linear(block.down(ops.gelu_mul(gate_up, self._tanh)))
        state["hidden"], state["residual"] = self.mixer(self.norm(ops.add(added, total))), total

    def _attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        block = self.block
        qkv = block.qkv(x)
        if self.adapters:
            qkv = self._ops.add(qkv, self._ops.join([adapter(x) for adapter in self.adapters]))
        parts = qkv.split([shard.length for shard in block.heads], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, block.head_size)) for part in parts)
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions)
        return block.o(self.attend(q, k, v))


class Zamba2Model(DecoderModel):
    """Zamba2ForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Zamba2.filled(context.description.config)
        size, eps = model.hidden_size, number(config, "rms_norm_eps")
        rotary = None
        if flag(config, "use_mem_rope", False):
            rotary = make_rotary(context, read_rope(config, integer(config, "head_dim")))
        form, uses = Zamba2.mixer(config), Zamba2.uses(config)
        blocks: dict[tuple[bool, int], SharedBlock] = {}

        def layer(given: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            if index not in uses:
                norm = RMSNorm(given, size, eps, f"{name}.input_layernorm")
                return MixerLayer(norm, Mamba2Mixer(given, index, form, f"{name}.mamba"))
            first, use = uses[index]
            shared = f"model.layers.{first}.shared_transformer"
            mine = given is context, first
            if mine not in blocks:
                blocks[mine] = SharedBlock(given, index, config, shared)
            return HybridLayer(given, index, config, rotary, blocks[mine], shared, use)

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.final_layernorm"), tied(config, True))

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor | None:
        """As `Decoder.forward`; the embedding goes along as `embedded`."""
        if "hidden" not in state:
            state["hidden"] = self.embed(state["token_ids"])
        if "embedded" not in state:
            state["embedded"] = self.context.ops.scale(state["hidden"], 1.0)
        return super().forward(state, walk)

    def state_sizes(self) -> Mapping[str, int]:
        """And `embedded`."""
        return {**super().state_sizes(), "embedded": self.context.description.hidden_size}
