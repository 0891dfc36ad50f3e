"""Models that transformers has no class of, beside one that computes the same from tensors with other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_table import WITHOUT_ORACLE

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
GROUP, HEAD = 2, 8
"""Of the small config: queries of each KV head, elements of a head."""
LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "InternLM2ForCausalLM": ("LlamaForCausalLM", {"attention_bias": True}),
    "InternLM2ForRewardModel": ("LlamaModel", {"attention_bias": True}),
    "InternLM3ForCausalLM": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
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


def as_llama(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """One of InternLM2's tensors under Llama's names, its rows as Llama has them."""
    if ".attention.wqkv." in name:
        rows = tensor.unflatten(0, (-1, GROUP + 2, HEAD))
        parts = {"q": rows[:, :GROUP].flatten(0, 2), "k": rows[:, GROUP].flatten(0, 1), "v": rows[:, -1].flatten(0, 1)}
        return [(name.replace("attention.wqkv", f"self_attn.{p}_proj"), part) for p, part in parts.items()]
    for old, new in NAMES.items():
        name = name.replace(f"{old}.", f"{new}.")
    return [(name, tensor)]


@pytest.mark.parametrize("architecture", WITHOUT_ORACLE)
def test_as_one_that_transformers_has(architecture: str) -> None:
    """Logits, or the reward, of every token of a prompt."""
    words = {"driver": architecture, "config": WITHOUT_ORACLE[architecture], "oracle": None}
    suite: Any = type("Suite", (ModelConformance,), words)
    other, more = LLAMA[architecture]
    oracle = Oracle(other, {**small_config(other, more), "architectures": [other]})
    tensors = dict(draw(suite.tensors()))
    head = tensors.pop("v_head.weight", None)
    oracle.load(pair for name, tensor in tensors.items() for pair in as_llama(name, tensor))
    ids = suite.ids(23)
    expected = oracle(ids) if head is None else oracle(ids) @ head.double().T
    torch.testing.assert_close(suite.alone(ids), expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))
