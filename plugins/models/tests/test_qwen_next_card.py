"""What Qwen3-Next's config says: of its published size, and nonsense."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.interfaces.model import ModelNeed
from engine.kv.layout import make_layout
from engine.types.errors import EngineError
from engine.types.parallel import Parallel
from engine_models.qwen_next_card import Qwen3Next, Qwen3NextMTP

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "intermediate_size": 5120, "max_position_embeddings": 262144, "rope_theta": 10000000,
    "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
}  # fmt: skip
"""Of Qwen3-Next-80B-A3B."""


def need(tp: int = 1, **changed: Any) -> ModelNeed:
    return ModelNeed(
        architecture="Qwen3NextForCausalLM", config={**PUBLISHED, **changed}, parallel=Parallel(tp=tp)
    )  # fmt: skip


@pytest.mark.parametrize("computed", ["bfloat16", "float32", "float64"])
def test_the_published_model(computed: str) -> None:
    """Its blocks stay at 1,040 tokens with the layer that drafts, and states do not lose what is computed."""
    model = Qwen3Next.describe(PUBLISHED).computed_in(computed)
    assert [site.kind for site in model.sites[:5]] == ["state", "state", "state", "full", "state"]
    draft = Qwen3NextMTP.describe(PUBLISHED)
    assert [site.kind for site in draft.sites] == ["full"] and draft.config == PUBLISHED
    conv, delta = model.kv_specs[0].states
    assert (conv.shape, conv.dtype, delta.shape) == ((3, 8192), computed, (32, 128, 128))
    assert delta.dtype == ("float64" if computed == "float64" else "float32")
    sites = [*model.sites, *(msgspec.structs.replace(site, model=1) for site in draft.sites)]
    itemsize = {"bfloat16": 2, "float32": 4, "float64": 8}[computed]
    layout = make_layout(sites, block_size=16, kv_itemsize=itemsize, tokens_per_page={})
    assert layout.block_size <= 1040
    assert Qwen3Next.unsupported(need()) == Qwen3Next.unsupported(need(8)) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layer_types": ["full_attention"]}, "a type for each of the 48 layers"),
        ({"layer_types": ["sliding_attention"] * 48}, "'sliding_attention' is neither"),
        ({"linear_num_value_heads": 40}, "no multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"num_experts_per_tok": 600}, "600 of 512 experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_nonsense_is_refused_by_key(changed: dict[str, Any], said: str) -> None:
    reasons = Qwen3Next.unsupported(need(**changed))
    assert any(said in reason for reason in reasons), reasons


def test_ranks_that_cannot_share_its_heads() -> None:
    assert any(
        "linear_num_key_heads 6" in r
        for r in Qwen3Next.unsupported(need(4, linear_num_key_heads=6, linear_num_value_heads=12))
    )


def test_all_layers_dense() -> None:
    config = Qwen3Next.filled({**PUBLISHED, "num_experts": 0})
    assert not any(Qwen3Next.sparse(config)) and Qwen3Next.unsupported(need(num_experts=0)) == []
    with pytest.raises(EngineError, match="mlp_only_layers"):
        Qwen3Next.sparse({**config, "mlp_only_layers": "all"})
