"""What the card says, on machines that are not there; and what FlashInfer says of itself where it is installed."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from engine.interfaces.attention import AttentionNeed
from engine.types.errors import ConfigError
from engine_flashinfer import card as card_module
from engine_flashinfer import installed
from engine_flashinfer.card import FlashInferAttention, FlashInferOptions
from engine_flashinfer.installed import Facts

WHOLE = {"version": "0.7.2.post1", "cache": "0.7.2.post1+cu130"}


def need(**changes: Any) -> AttentionNeed:
    facts = {
        "kind": "full", "head_size": 128, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16",
        "kv_dtype": "bfloat16", "device": "cuda", "block_size": 16,
    }  # fmt: skip
    return AttentionNeed(**{**facts, **changes})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts the card onto a machine: an H100 where nothing else is said."""

    def put(capability: tuple[int, int] | None = (9, 0), **more: Any) -> None:
        found = Facts(() if capability is None else (capability,), **more)
        monkeypatch.setattr(card_module, "facts", lambda: found)

    return put


def test_this_machine_is_told_apart() -> None:
    if not installed.facts().capabilities:
        assert FlashInferAttention.unsupported(need()) == ["no NVIDIA GPU was found: the driver's NVML does not answer"]
    assert FlashInferAttention.unsupported(need(device="cpu")) == ["it needs an NVIDIA GPU, not device cpu"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "sliding", "sliding_window": 128, "soft_cap": 30.0, "features": frozenset({"sinks"})},
        {"dtype": "float16", "kv_dtype": "float16", "head_size": 64, "block_size": 1},
        {"kv_dtype": "float8_e4m3fn", "head_size": 256},
    ],
)
def test_what_is_served(machine: Callable[..., None], changes: Any) -> None:
    machine(**WHOLE)
    assert FlashInferAttention.unsupported(need(**changes)) == []
    assert FlashInferAttention.tokens_per_page(need(**changes)) == need(**changes).block_size
    said = FlashInferAttention.remarks(need(**changes))
    assert "0.7.2" in said[0] and "flashinfer-jit-cache" in said[0] and "never run on a GPU" in said[1]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"kind": "encoder"}, "encoder"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype float32"),
        ({"kv_dtype": "float16"}, "only of that or float8_e4m3fn"),
        ({"head_size": 80}, "64, 128, 256 elements, not 80"),
        ({"features": frozenset({"kv_index"})}, "kv_index"),
        ({"features": frozenset({"alibi"})}, "slopes of its own making"),
        ({"features": frozenset({"tree_mask"})}, "tree_mask"),
    ],
)
def test_what_is_not(machine: Callable[..., None], changes: Any, word: str) -> None:
    machine(**WHOLE)
    (reason,) = FlashInferAttention.unsupported(need(**changes))
    assert word in reason


@pytest.mark.parametrize(
    ("there", "word"),
    [
        ({"capability": None}, "no NVIDIA GPU was found"),
        ({"capability": (7, 5), **WHOLE}, "compute capability 8.0 at least, not 7.5"),
        ({"rocm": True, **WHOLE}, "ROCm"),
        ({}, "pip install 'flashinfer-python>=0.7'"),
        ({"version": "0.6.1", "cache": "0.6.1"}, "0.6.1 is too old"),
        ({"version": "0.7.2"}, "nvcc, which compiles its kernels, is missing"),
        ({"version": "0.7.2", "compiler": "/usr/bin/nvcc", "ninja": False}, "ninja, by which"),
        ({"version": "0.7.2", "cache": "0.7.1+cu130"}, "does not match flashinfer-python 0.7.2"),
    ],
)
def test_what_is_missing(machine: Callable[..., None], there: Any, word: str) -> None:
    machine(**there)
    (reason,) = FlashInferAttention.unsupported(need())
    assert word in reason


def test_kernels_that_are_compiled_here(machine: Callable[..., None]) -> None:
    machine(version="0.7.2", compiler="/usr/local/cuda/bin/nvcc")
    assert FlashInferAttention.unsupported(need()) == []
    assert "compiled at the first start by /usr/local/cuda/bin/nvcc" in FlashInferAttention.remarks(need())[0]


def test_options() -> None:
    assert FlashInferOptions().workspace_mib == 256
    with pytest.raises(ValueError, match="workspace_mib"):
        FlashInferOptions(workspace_mib=1)


def test_a_wrapper_of_another_build_is_refused() -> None:
    from engine_flashinfer.wrappers import check

    with pytest.raises(ConfigError, match="has no _pin_memory_int_workspace_buffer"):
        check(object())


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_flashinfer_itself() -> None:
    """What is called is there, and the double takes no argument that FlashInfer does not."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Real
    from flashinfer_double import BatchPrefillWithPagedKVCacheWrapper as Double

    from engine_flashinfer.wrappers import ATTRIBUTES, load

    assert load() is Real
    for method in ("__init__", "plan", "run"):
        real, double = (inspect.signature(getattr(cls, method)).parameters for cls in (Real, Double))
        assert set(double) <= set(real)
        shared = [name for name in real if name in double]
        assert shared == list(double), f"{method}: another order"
        assert [double[name].default for name in shared] == [real[name].default for name in shared]
        assert [double[name].kind for name in shared] == [real[name].kind for name in shared]
    text = inspect.getsource(inspect.getmodule(inspect.unwrap(Real.plan)))
    assert all(f"self.{name}" in text for name in ATTRIBUTES)
