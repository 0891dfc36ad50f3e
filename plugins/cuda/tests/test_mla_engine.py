"""The engine with attention `mla`, as a user chooses it: its kernels interpreted, on the processor."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from mla_engine import greedy

from engine import LLM
from engine.interfaces.attention import AttentionNeed
from engine.types.errors import PluginError
from engine_cuda.attention_mla.card import TritonLatentAttention

NEED = AttentionNeed(
    kind="mla", head_size=576, rope_size=64, num_q_heads=16, num_kv_heads=1, dtype="bfloat16", kv_dtype="bfloat16",
    device="cuda:0", block_size=16,
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
def test_the_engine_says_what_the_reference_says() -> None:
    assert greedy("dummy:mla-tiny", "mla") == greedy("dummy:mla-tiny", "torch_mla")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by name it stops the start; `auto` passes it over."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(PluginError, match="it needs a GPU"):
        LLM(model="dummy:mla-tiny", attention="mla", platform="host")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "full"}, "layers of kind 'full' are not served"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "float64"),
        ({"head_size": 1088}, "latents of 1024"),
        ({"rope_size": 0}, "rotated keys of 0"),
        ({"kv_dtype": "float32"}, "saves no memory"),
        ({"soft_cap": 30.0}, "soft cap"),
        ({"features": frozenset({"sinks"})}, "'sinks'"),
    ],
)
def test_what_it_refuses(change: dict[str, object], words: str) -> None:
    fields = {**vars(NEED), **change}
    assert TritonLatentAttention.unsupported(NEED) == []
    assert words in " ".join(TritonLatentAttention.unsupported(AttentionNeed(**fields)))  # type: ignore[arg-type]
