"""The card of Zamba2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import bad_key, flag, integer, kv_heads, number
from engine_models.decoder_card import GELU
from engine_models.hybrid_card import HybridCard
from engine_states.forms import Mamba2Form

_HYBRID, _MIXER = "hybrid", ("linear_attention", "mamba")


class Zamba2(HybridCard):
    """Zamba2ForCausalLM (Zyphra 2024): Mamba-2's mixer in every layer, and before some of them one of a few transformer
    blocks whose weights several layers share, with small adapters of their own."""

    body = "engine_models.zamba2:Zamba2Model"
    takes_embeds = False  # every shared block reads the embeddings again
    operations = HybridCard.operations | {"gelu_mul"}
    activations = GELU
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    foreign: ClassVar[Mapping[str, Any]] = {"use_long_context": False}

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Shared blocks read twice the hidden size; their heads share that, where the config says nothing else."""
        size, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads", 32)
        of_head = integer(config, "attention_head_dim", integer(config, "head_dim", 2 * size // heads))
        inner = config.get("intermediate_size") or 4 * size
        sizes = {"num_attention_heads": heads, "head_dim": of_head, "intermediate_size": inner}
        return {**super().filled(config), **sizes}

    @classmethod
    def mixer(cls, config: Mapping[str, Any]) -> Mamba2Form:
        """Of every layer."""
        size = integer(config, "hidden_size")
        heads, groups = integer(config, "n_mamba_heads", 8), integer(config, "mamba_ngroups", 1)
        inner, bias = int(number(config, "mamba_expand", 2) * size), flag(config, "add_bias_linear", False)
        of_head = integer(config, "mamba_headdim", inner // heads)
        if inner != heads * of_head:
            raise bad_key(config, "n_mamba_heads", f"{heads} heads of {of_head} are not the {inner} channels")
        if heads % groups:
            raise bad_key(config, "mamba_ngroups", f"{heads} heads do not stand in {groups} groups of one size")
        return Mamba2Form(
            hidden_size=size,
            heads=heads,
            head_size=of_head,
            groups=groups,
            state=integer(config, "mamba_d_state", 64),
            kernel=integer(config, "mamba_d_conv", 4, low=2),
            eps=1e-5,
            dt_limit=(number(config, "time_step_min", 0.001), float("inf")),
            bias=bias,
            conv_bias=True,
        )

    @classmethod
    def attends(cls, config: Mapping[str, Any]) -> list[bool]:
        """Those of type "hybrid"."""
        layers, given = integer(config, "num_hidden_layers"), config.get("layers_block_type")
        if not isinstance(given, (list, tuple)) or len(given) != layers:
            raise bad_key(config, "layers_block_type", f"it does not name a type for each of the {layers} layers")
        for kind in given:
            if kind != _HYBRID and kind not in _MIXER:
                raise bad_key(config, "layers_block_type", f"{kind!r} is neither {_HYBRID!r} nor {_MIXER[0]!r}")
        return [kind == _HYBRID for kind in given]

    @classmethod
    def uses(cls, config: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
        """Layer -> (the first layer that uses the same shared block, how many layers before it use any)."""
        hybrid = [index for index, attends in enumerate(cls.attends(config)) if attends]
        blocks = integer(config, "num_mem_blocks", 1)
        return {index: (hybrid[place % blocks], place) for place, index in enumerate(hybrid)}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """What the adapters' widths, which follow hidden_size, do not fit."""
        twice, heads = 2 * integer(config, "hidden_size"), integer(config, "num_attention_heads")
        integer(config, "num_mem_blocks", 1), integer(config, "adapter_rank", 128)
        reasons = []
        if integer(config, "attention_hidden_size", twice) != twice:
            reasons.append(f"attention_hidden_size {config['attention_hidden_size']} is not 2 * hidden_size = {twice}")
        if flag(config, "use_shared_attention_adapter", False):
            if kv_heads(config) != heads:
                reasons.append("use_shared_attention_adapter with fewer num_key_value_heads than num_attention_heads")
            if heads * config["head_dim"] != twice:
                reasons.append(f"use_shared_attention_adapter with {heads} heads that have not all {twice} elements")
        return reasons
