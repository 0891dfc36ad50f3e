"""Driver `mla` on a GPU: through the suite of its point with DeepSeek's sizes too, and in the engine."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from mla_engine import greedy

from engine_sdk.conformance import AttentionConformance, AttentionThorough


@pytest.mark.gpu
class TestOnGpu(AttentionThorough, AttentionConformance):
    driver, device = "mla", "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["dummy:mla-tiny", "dummy:mla-tiny,latent=512,rope=64,heads=128"])
def test_the_engine_says_what_the_reference_says(model: str) -> None:
    """In float32, prompts whole and in chunks, captured decodes where the platform captures."""
    assert greedy(model, "mla") == greedy(model, "torch_mla")
