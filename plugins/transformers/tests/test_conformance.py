"""The suite of engine-sdk for the fallback, beside transformers, under both of its names: by itself and asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from fallback_table import ALONE, DIVIDED, SERVED

from engine_sdk.conformance import ModelConformance

TENSORS = r"^test_(as_transformers|a_missing_tensor|a_tensor_of|an_unexpected_tensor|weights_are_cast)"
WINDOWS = r"^test_(as_transformers|chunked_prefill|ragged_batch|its_layers_are)"
"""What is tried quickly of the second and third; the rest is `make test-all`'s."""


class TestDense(ModelConformance):
    """As many KV heads as ranks; those below have fewer."""

    driver = "*"
    architecture = "HeliumForCausalLM"
    config: ClassVar[dict[str, Any]] = {**ALONE["HeliumForCausalLM"], "num_key_value_heads": 4}


class TestExperts(ModelConformance):
    """Tensors that are put together of several in the checkpoint."""

    driver = "transformers"
    architecture = "FlexOlmoForCausalLM"
    config = ALONE["FlexOlmoForCausalLM"]
    quick = TENSORS


class TestWindows(ModelConformance):
    """Layers of both kinds."""

    driver = "transformers"
    architecture = "CwmForCausalLM"
    config = ALONE["CwmForCausalLM"]
    quick = WINDOWS


@pytest.mark.parametrize("architecture", sorted(DIVIDED))
def test_two_ranks(architecture: str) -> None:
    """Logits of every position, of ranks that are threads, in float64."""
    words = {"driver": "transformers", "architecture": architecture, "config": {**ALONE, **SERVED}[architecture]}
    suite = type("Suite", (ModelConformance,), words)
    assert not suite.described().unsupported(suite.need(2))
    suite().test_tensor_parallel(2)
