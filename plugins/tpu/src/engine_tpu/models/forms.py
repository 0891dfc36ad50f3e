"""What kind of decoder each architecture is: from a described model to the form that `Decoder` computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.types.model import ModelDescription
from engine_kit.model_config import Config, RopeConfig, flag, integer, number, read_rope
from engine_models.gemma_card import Gemma2, Gemma3
from engine_models.mixtral_card import Mixtral
from engine_models.qwen_moe_card import Qwen3Moe

Act = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """Routed experts in place of a feed-forward block.

    Attributes:
        count, top_k: experts, and how many of them a token uses.
        inner: an expert's inner size.
        renormalise: the weights of those that a token uses add up to 1.
        block: the checkpoint's name of the block in a layer. parts: of gate, up and down in an expert.
    """

    count: int
    top_k: int
    inner: int
    renormalise: bool
    block: str
    parts: tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class DecoderForm:
    """Where models differ.

    Attributes:
        eps: of norms.
        inner: of the feed-forward block.
        ropes: rotary positions: of layers that see everything, and of those with a window, where these have others.
        qkv_bias, o_bias, mlp_bias: whether projections have biases.
        qk_norm: each head's queries and keys are normed.
        offset_norms: weights of norms are stored less 1.
        sandwich: what blocks give is normed, too, before it is added.
        tied: the embedding is the head.
        act: between the projections of the feed-forward block.
        scale: of attention's scores.
        embed_scale: embeddings are multiplied by it.
        logits_cap: logits are squashed to +-cap by tanh; None: not.
        experts: None where all layers are dense. sparse: which layers have them.
    """

    eps: float
    inner: int
    ropes: tuple[RopeConfig, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    offset_norms: bool = False
    sandwich: bool = False
    tied: bool = False
    act: Act = "silu"
    scale: float
    embed_scale: float = 1.0
    logits_cap: float | None = None
    experts: ExpertForm | None = None
    sparse: tuple[bool, ...] = ()


def form_of(model: ModelDescription) -> DecoderForm:
    """The form of a described model."""
    return _FORMS[model.architecture](model)


def _plain(model: ModelDescription, config: Config, **more: Any) -> DecoderForm:
    """What most have; `more` is what a model has besides, or otherwise."""
    size = model.kv_specs[0].head_size
    common = {
        "eps": number(config, "rms_norm_eps", 1e-6),
        "inner": integer(config, "intermediate_size"),
        "tied": flag(config, "tie_word_embeddings", False),
        "scale": size**-0.5,
    }
    if "ropes" not in more:
        common["ropes"] = (read_rope(config, size),)
    return DecoderForm(**(common | more))


def _llama(model: ModelDescription) -> DecoderForm:
    bias = flag(model.config, "attention_bias", False)
    mlp_bias = flag(model.config, "mlp_bias", False)
    return _plain(model, model.config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(model: ModelDescription) -> DecoderForm:
    return _plain(model, model.config)


def _qwen2(model: ModelDescription) -> DecoderForm:
    return _plain(model, model.config, qkv_bias=True)


def _qwen3(model: ModelDescription) -> DecoderForm:
    bias = flag(model.config, "attention_bias", False)
    return _plain(model, model.config, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma(card: type[Gemma2], qk_norm: bool) -> Callable[[ModelDescription], DecoderForm]:
    def form(model: ModelDescription) -> DecoderForm:
        config, size = card.filled(model.config), model.kv_specs[0].head_size
        bias, cap = flag(config, "attention_bias", False), config["final_logit_softcapping"]
        return _plain(
            model,
            config,
            ropes=tuple(read_rope(rope, size) for rope in card.ropes(config)),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=qk_norm,
            offset_norms=True,
            sandwich=True,
            tied=flag(config, "tie_word_embeddings", True),
            act=card.act(config),
            scale=number(config, "query_pre_attn_scalar") ** -0.5,
            embed_scale=model.hidden_size**0.5,
            logits_cap=None if cap is None else number(config, "final_logit_softcapping"),
        )

    return form


def _mixtral(model: ModelDescription) -> DecoderForm:
    config = Mixtral.filled(model.config)
    experts = ExpertForm(
        count=Mixtral.num_experts(config),
        top_k=Mixtral.form(config).top_k,
        inner=integer(config, Mixtral.inner),
        renormalise=True,
        block="block_sparse_moe",
        parts=("w1", "w3", "w2"),
    )
    return _plain(model, config, experts=experts, sparse=(True,) * model.num_layers)


def _qwen3_moe(model: ModelDescription) -> DecoderForm:
    config = Qwen3Moe.filled(model.config)
    bias, route = flag(config, "attention_bias", False), Qwen3Moe.form(config)
    experts = ExpertForm(
        count=Qwen3Moe.num_experts(config),
        top_k=route.top_k,
        inner=integer(config, Qwen3Moe.inner),
        renormalise=route.renormalise,
        block="mlp",
        parts=("gate_proj", "up_proj", "down_proj"),
    )
    sparse = tuple(Qwen3Moe.sparse(config))
    return _plain(model, config, qkv_bias=bias, o_bias=bias, qk_norm=True, experts=experts, sparse=sparse)


_FORMS: Mapping[str, Callable[[ModelDescription], DecoderForm]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma(Gemma2, qk_norm=False),
    "Gemma3ForCausalLM": _gemma(Gemma3, qk_norm=True),
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
