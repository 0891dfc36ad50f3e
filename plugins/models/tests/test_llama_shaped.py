"""Models that transformers has no class of, beside one that computes the same from tensors with other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_table import WITHOUT_ORACLE

from engine.interfaces.model import ModelNeed
from engine_models.llama_shaped_card import Baichuan
from engine_sdk.conformance import ModelConformance
from engine_sdk.conformance.model.example import draw
from engine_sdk.conformance.model.oracle import TOLERANCE, Oracle
from engine_sdk.conformance.model.small import small_config

NAMES = {
    "model.tok_embeddings": "model.embed_tokens", "output": "lm_head", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip
"""InternLM2's -> Llama's."""
GLM_NAMES = {
    "transformer.embedding.word_embeddings": "model.embed_tokens", "transformer.output_layer": "lm_head",
    "transformer.encoder.final_layernorm": "model.norm", "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.gate_up_proj", "mlp.dense_4h_to_h": "mlp.down_proj",
}  # fmt: skip
"""ChatGLM's -> GLM-4's."""
GROUP, HEAD = 2, 8
"""Of the small config: queries of each KV head, elements of a head."""
LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "InternLM2ForCausalLM": ("LlamaForCausalLM", {"attention_bias": True}),
    "InternLM2ForRewardModel": ("LlamaModel", {"attention_bias": True}),
    "InternLM3ForCausalLM": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "BaichuanForCausalLM": ("LlamaForCausalLM", {}),
    "BaiChuanForCausalLM": ("LlamaForCausalLM", {}),
    "ChatGLMModel": ("GlmForCausalLM", {}),
    "ChatGLMForConditionalGeneration": ("GlmForCausalLM", {}),
    "MiniCPMForCausalLM": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "attention_multiplier": HEAD**-0.5,
            "logits_scaling": 32 / 8,
        },
    ),
}
"""architecture -> the class of transformers that computes the same, and what its small config has to say."""


def as_known(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A tensor under the name that a class of transformers has for it, its rows as that has them."""
    if ".attention.wqkv." in name:
        rows = tensor.unflatten(0, (-1, GROUP + 2, HEAD))
        parts = {"q": rows[:, :GROUP].flatten(0, 2), "k": rows[:, GROUP].flatten(0, 1), "v": rows[:, -1].flatten(0, 1)}
        return [(name.replace("attention.wqkv", f"self_attn.{p}_proj"), part) for p, part in parts.items()]
    name = name.replace("transformer.encoder.layers.", "model.layers.")
    for packed in ("self_attn.W_pack", "self_attention.query_key_value"):
        if packed in name:
            keys = tensor.shape[0] // (GROUP + 2)
            return [
                (name.replace(packed, f"self_attn.{part}_proj"), rows)
                for part, rows in zip("qkv", tensor.split([GROUP * keys, keys, keys]), strict=True)
            ]
    for old, new in {**NAMES, **GLM_NAMES}.items():
        name = name.replace(f"{old}.", f"{new}.")
    return [(name, tensor)]


def suite_of(architecture: str) -> Any:
    words = {"driver": architecture, "config": WITHOUT_ORACLE[architecture], "oracle": None}
    return type("Suite", (ModelConformance,), words)


def known(suite: Any, architecture: str) -> Oracle:
    """The class that computes the same, with the suite's weights; that of a reward model has no head."""
    other, more = LLAMA[architecture]
    oracle = Oracle(other, {**small_config(other, more), "architectures": [other]})
    tensors = {name: tensor for name, tensor in draw(suite.tensors()) if name != "v_head.weight"}
    oracle.load(pair for name, tensor in tensors.items() for pair in as_known(name, tensor))
    return oracle


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))


@pytest.mark.parametrize("architecture", [name for name in WITHOUT_ORACLE if name != "BaichuanForCausalLM"])
def test_as_one_that_transformers_has(architecture: str) -> None:
    """Logits, or the reward, of every token of a prompt."""
    suite = suite_of(architecture)
    ids = suite.ids(23)
    expected, head = known(suite, architecture)(ids), dict(draw(suite.tensors())).get("v_head.weight")
    near(suite.alone(ids), expected if head is None else expected @ head.double().T)


def test_with_distances_as_llama_without_positions() -> None:
    """Baichuan 13B: Llama with all tokens at position 0, so that nothing is rotated, and a mask that says distances."""
    suite = suite_of("BaichuanForCausalLM")
    oracle, ids = known(suite, "BaichuanForCausalLM"), suite.ids(23)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    places = torch.arange(23)
    away = (places[None] - places[:, None]).double()
    mask = (slopes[:, None, None] * away).masked_fill(away > 0, float("-inf"))[None]
    with torch.no_grad():
        expected = oracle._model(torch.tensor([ids]), attention_mask=mask, position_ids=torch.zeros(1, 23).long())
    near(suite.alone(ids), expected.logits[0])


def test_the_head_of_baichuan_2_is_normed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of its vocabulary; the rows of another's are as they are."""
    suite = suite_of("BaiChuanForCausalLM")
    oracle, ids = known(suite, "BaiChuanForCausalLM"), suite.ids(9)
    expected = oracle(ids) / oracle._model.lm_head.weight.norm(dim=-1)
    monkeypatch.setattr(Baichuan, "normed_vocabulary", 99)
    near(suite.alone(ids), expected)


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("BaichuanForCausalLM", {"model_max_length": None}, "'max_position_embeddings'"),
        ("BaiChuanForCausalLM", {"hidden_size": 5120}, "have none"),
        ("ChatGLMModel", {"multi_query_attention": False}, "sets multi_query_attention to False"),
        ("ChatGLMModel", {"add_bias_linear": True}, "sets add_bias_linear"),
        ("ChatGLMModel", {"rope_ratio": 0}, "'rope_ratio'"),
        ("ChatGLMModel", {"padded_vocab_size": None}, "'padded_vocab_size'"),
    ],
)
def test_what_is_refused(architecture: str, change: dict[str, Any], words: str) -> None:
    """By the key's name."""
    suite = suite_of(architecture)
    need = ModelNeed(architecture=architecture, config={**suite.whole_config(), **change})
    (found,) = suite.described().unsupported(need)
    assert words in found
