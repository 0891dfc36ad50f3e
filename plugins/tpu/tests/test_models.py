"""The models through the suite of engine-sdk: in the JAX worker, beside transformers and beside themselves."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from jax_engines import CACHE

from engine.cli.main import main
from engine_sdk.conformance import ServedModelConformance


class Served(ServedModelConformance):
    """On XLA's processor device, with buckets of few sizes."""

    platform = "tpu"
    platform_options: ClassVar[dict[str, Any]] = {"cache_dir": CACHE, "rows": "8", "tokens": "64"}
    divided = "tensor_parallel"


class TestLlama(Served):
    """What takes a few seconds."""

    driver = "engine-tpu:LlamaForCausalLM"
    config: ClassVar[dict[str, Any]] = {"attention_bias": True, "mlp_bias": True}
    test_variants_of_the_config = test_every_tensor_matters = test_divided = None  # type: ignore[assignment]
    test_dtypes = test_weights_are_cast = test_card_is_light = None  # type: ignore[assignment]


class _Long(Served):
    """The rest of them takes half a minute each."""

    pytestmark = pytest.mark.slow


class TestWholeLlama(_Long):
    """All that its family has."""

    driver = "engine-tpu:LlamaForCausalLM"
    config: ClassVar[dict[str, Any]] = {"attention_bias": True, "mlp_bias": True}


class TestMistral(_Long):
    """One window for all layers."""

    driver = "engine-tpu:MistralForCausalLM"
    config: ClassVar[dict[str, Any]] = {"sliding_window": 5}


class TestQwen2(_Long):
    """Windows in the upper layers, one matrix at both ends."""

    driver = "engine-tpu:Qwen2ForCausalLM"
    config: ClassVar[dict[str, Any]] = {
        "use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    }  # fmt: skip


class TestQwen3(_Long):
    """Norms of queries and keys."""

    driver = "engine-tpu:Qwen3ForCausalLM"
    config: ClassVar[dict[str, Any]] = {"head_dim": 16, "attention_bias": True}


class TestGemma2(_Long):
    """Soft caps and windows."""

    driver = "engine-tpu:Gemma2ForCausalLM"
    config: ClassVar[dict[str, Any]] = {"query_pre_attn_scalar": 10, "sliding_window": 5}


class TestGemma3(_Long):
    """Rotary positions of two kinds."""

    driver = "engine-tpu:Gemma3ForCausalLM"
    config: ClassVar[dict[str, Any]] = {
        "query_pre_attn_scalar": 10, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip


class TestMixtral(_Long):
    """Experts."""

    driver = "engine-tpu:MixtralForCausalLM"
    config: ClassVar[dict[str, Any]] = {"sliding_window": 5}


class TestQwen3Moe(_Long):
    """Experts beside a dense layer."""

    driver = "engine-tpu:Qwen3MoeForCausalLM"
    config: ClassVar[dict[str, Any]] = {"mlp_only_layers": [0], "norm_topk_prob": True}


def test_the_command_finds_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    """`engine plugins test` takes the name with its distribution, and the platform of the card's framework."""
    assert main(["plugins", "test", "model", "engine-tpu:LlamaForCausalLM", "-k", "describe_is_pure"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("model engine-tpu:LlamaForCausalLM (engine-tpu ") and ": 1 passed, 0 skipped" in said
