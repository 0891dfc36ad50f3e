"""Encoders beside the formulas that transformers has no class of, and from files in the words of their first code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_table import ENCODERS

from engine.interfaces.model import ModelNeed
from engine.types.parallel import Parallel
from engine_kit.model_config import read_rope
from engine_kit.rotary import inverse_frequencies
from engine_models.encoder_card import Gte, JinaBert, ModernBert, ModernBertClassifier, Nomic
from engine_sdk.conformance import EncoderModelConformance
from engine_sdk.conformance.model.example import draw


def suite_of(driver: str, **words: Any) -> Any:
    return type("Suite", (EncoderModelConformance,), {"driver": driver, **words})


def jina(w: dict[str, torch.Tensor], ids: list[int], types: list[int], config: dict[str, Any]) -> torch.Tensor:
    """The published formula, for a number of heads that is a power of 2; one head and one layer after another."""
    eps, heads = config["layer_norm_eps"], config["num_attention_heads"]
    size, count = config["hidden_size"] // heads, len(ids)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    words, kinds = (w[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
    x = norm(words[ids] + kinds[types], "embeddings.LayerNorm")
    distance = (torch.arange(count)[:, None] - torch.arange(count)).abs()
    for index in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{index}"
        q, k, v = (linear(x, f"{name}.attention.self.{part}") for part in ("query", "key", "value"))
        seen = []
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            scores = q[:, at] @ k[:, at].T / size**0.5 - 2.0 ** (-8 * (head + 1) / heads) * distance
            seen.append(scores.softmax(-1) @ v[:, at])
        out = linear(torch.cat(seen, dim=-1), f"{name}.attention.output.dense")
        x = norm(out + x, f"{name}.attention.output.LayerNorm")
        gate, up = (x @ w[f"{name}.mlp.gated_layers.weight"].T).chunk(2, dim=-1)
        x = norm(linear(F.gelu(gate) * up, f"{name}.mlp.wo") + x, f"{name}.mlp.layernorm")
    return x


def test_jina_bert() -> None:
    suite = suite_of("JinaBertForMaskedLM", config=ENCODERS["JinaBertForMaskedLM"], oracle=None)
    weights = {name: tensor.double() for name, tensor in draw(suite.tensors())}
    ids, types = suite.ids(23), [0] * 11 + [1] * 12
    expected = jina(weights, ids, types, suite.whole_config())
    torch.testing.assert_close(suite.alone(ids, types), expected, rtol=1e-10, atol=1e-10)


def test_ntk_of_the_first_files() -> None:
    """Angles as the published code has them: theta times the factor, and all divided by factor ** (2 / head size)."""
    config = {
        "architectures": ["NewModel"], "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64,
        "rope_theta": 160000, "rope_scaling": {"type": "ntk", "factor": 2.0},
    }  # fmt: skip
    found, _ = inverse_frequencies(read_rope(Gte.filled(config), 16), torch.float64)
    expected = (160000 * 2.0) ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16) / 2.0 ** (2 / 16)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


NOMIC = {
    "architectures": ["NomicBertModel"], "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48,
    "n_positions": 8192, "activation_function": "swiglu", "rotary_emb_base": 100, "rotary_emb_fraction": 1.0,
    "layer_norm_epsilon": 1e-2, "type_vocab_size": 2, "max_trained_positions": 2048, "rotary_emb_interleaved": False,
}  # fmt: skip


def test_nomics_first_files() -> None:
    """In GPT-2's words; they compute what transformers' words say."""
    plain: dict[str, Any] = suite_of("NomicBertModel").whole_config()
    own, other = Nomic.describe(NOMIC), Nomic.describe(plain)
    assert (own.max_model_len, own.pooler.pooling_type) == (2048, "mean")
    for key in ("hidden_size", "num_layers", "num_q_heads", "kv_specs", "num_token_types"):
        assert getattr(own, key) == getattr(other, key)
    first, second = Nomic.filled(NOMIC), Nomic.filled(plain)
    assert read_rope({**first, "max_position_embeddings": 64}, 8) == read_rope(second, 8)
    assert first["intermediate_size"] == second["intermediate_size"]
    assert first["layer_norm_eps"] == second["layer_norm_eps"]


MODERN = {
    "architectures": ["ModernBertModel"], "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip


def test_modern_berts_first_files() -> None:
    """What transformers 4 wrote, and what it left out: each third layer sees all, each kind has its theta."""
    windows = [spec.sliding_window for spec in ModernBert.describe(MODERN).kv_specs]
    assert windows == [None, 65, 65, None]
    old = {"local_attention": 6, "global_attn_every_n_layers": 2, "global_rope_theta": 99, "local_rope_theta": 7}
    windows = [spec.sliding_window for spec in ModernBert.describe({**MODERN, **old}).kv_specs]
    assert windows == [None, 4, None, 4]
    for given, thetas in ((MODERN, [160_000, 10_000]), ({**MODERN, **old}, [99, 7])):
        assert [read_rope(rope, 8).theta for rope in ModernBert.ropes(ModernBert.filled(given))] == thetas


@pytest.mark.parametrize(
    ("card", "config", "said"),
    [
        (Nomic, {**NOMIC, "num_experts": 8}, "num_experts to 8"),
        (Nomic, {**NOMIC, "rotary_emb_fraction": 0.5}, "a part of 8 elements"),
        (Nomic, {**NOMIC, "prenorm": True}, "prenorm to True"),
        (Gte, {"logn_attention_scale": True}, "logn_attention_scale to True"),
        (Gte, {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b is set"),
        (JinaBert, {"feed_forward_type": "reglu"}, "feed_forward_type 'reglu' is not 'geglu'"),
        (JinaBert, {"position_embedding_type": "absolute"}, "'absolute' is not 'alibi'"),
        (ModernBert, {"hidden_activation": "relu"}, "hidden_activation 'relu' is none of"),
        (ModernBert, {"layer_types": ["chunked_attention"] * 2}, "'chunked_attention' is neither"),
        (ModernBert, {"local_attention": 0}, "local_attention"),
        (ModernBert, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "sets rope_scaling to"),
        (ModernBertClassifier, {"classifier_pooling": "max"}, "'max' is neither 'cls' nor 'mean'"),
        (ModernBertClassifier, {"classifier_activation": ["gelu"]}, "['gelu'] is none of"),
        (ModernBert, {"hidden_activation": ["gelu"]}, "hidden_activation ['gelu'] is none of"),
    ],
)
def test_what_is_not_served(card: Any, config: dict[str, Any], said: str) -> None:
    sizes = {
        "architectures": ["X"], "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 64, "position_embedding_type": "rope", "head_dim": None,
    }  # fmt: skip
    if card is JinaBert:
        sizes |= ENCODERS["JinaBertForMaskedLM"]
    given = config if "n_embd" in config else {**sizes, **config}
    need = ModelNeed(architecture="X", config=given, parallel=Parallel())
    reasons = card.unsupported(need)
    assert len(reasons) == 1 and said in reasons[0], reasons
