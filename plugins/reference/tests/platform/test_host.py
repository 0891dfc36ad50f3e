"""The host platform: its facts, its memory, and that nothing it does goes on after the call."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.interfaces.context import WorkerContext
from engine.interfaces.platform import CaptureKey, PlatformNeed
from engine.types.errors import KVCacheTooSmallError
from engine.types.start import Seat
from engine_kit import host_memory as memory_module
from engine_kit.host_memory import MAX_DEFAULT_POOL, free_memory
from engine_reference.platform_host import card as card_module
from engine_reference.platform_host.card import HostPlatform
from engine_reference.platform_host.platform import HostPlatformBody


@pytest.fixture
def platform() -> HostPlatformBody:
    return HostPlatformBody(WorkerContext(start=SimpleNamespace(device="cpu", seat=Seat())))  # type: ignore[arg-type]


def test_facts() -> None:
    facts = HostPlatform.describe()
    assert facts.device == "cpu" and "cores" in facts.name and facts.framework == "torch"
    assert set(facts.dtypes) == {"float32", "bfloat16", "float16", "float64"}
    assert facts.dtypes.index("float32") < facts.dtypes.index("float16"), "float16 weights are computed in float32"


@pytest.mark.parametrize(("features", "best"), [({"avx2", "avx512_bf16"}, "bfloat16"), ({"avx2"}, "float32")])
def test_bfloat16_only_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, features: set[str], best: str
) -> None:
    monkeypatch.setattr(card_module, "processor", lambda: ("some processor", frozenset(features)))
    assert HostPlatform.describe().dtypes[0] == best


def test_unsupported() -> None:
    assert HostPlatform.unsupported(PlatformNeed()) == []
    assert HostPlatform.unsupported(PlatformNeed(dtype="bfloat16")) == []
    assert "int4" in HostPlatform.unsupported(PlatformNeed(dtype="int4"))[0]


def test_pool(platform: HostPlatformBody, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = platform.allocate_pool(3, 100)
    assert (pool.shape, pool.dtype, int(pool.sum())) == ((3, 100), torch.uint8, 0)
    with pytest.raises(KVCacheTooSmallError, match=r"bytes of memory are free.*--kv-cache-memory"):
        platform.allocate_pool(1 << 40, 1 << 20)
    monkeypatch.setattr(memory_module, "free_memory", lambda: 1 << 80)
    with pytest.raises(KVCacheTooSmallError, match="allocate a KV cache"):
        platform.allocate_pool(1 << 40, 1 << 20)


def test_the_pool_gets_what_weights_and_steps_leave(
    platform: HostPlatformBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = platform.kv_cache_memory(lambda: None, None)
    assert 0 < found.pool_bytes <= min(MAX_DEFAULT_POOL, free_memory())
    monkeypatch.setattr(memory_module, "peak_growth", lambda step: step() or 1 << 20)
    monkeypatch.setattr(memory_module, "total_memory", lambda: 1 << 40)
    monkeypatch.setattr(memory_module, "resident_memory", lambda: 3 << 20)
    monkeypatch.setattr(memory_module, "free_memory", lambda: (1 << 30) + (1 << 20))
    assert platform.kv_cache_memory(lambda: None, None) == (1 << 28, 1 << 20)
    assert platform.kv_cache_memory(lambda: None, 0.5) == (1 << 30, 1 << 20), "no more than is free"
    monkeypatch.setattr(memory_module, "free_memory", lambda: 1 << 50)
    assert platform.kv_cache_memory(lambda: None, None).pool_bytes == MAX_DEFAULT_POOL
    assert platform.kv_cache_memory(lambda: None, 0.5).pool_bytes == (1 << 39) - (4 << 20)
    start = SimpleNamespace(device="cpu", seat=Seat(sharers=4))
    four = HostPlatformBody(WorkerContext(start=start))  # type: ignore[arg-type]
    assert four.kv_cache_memory(lambda: None, None).pool_bytes == MAX_DEFAULT_POOL // 4, "ranks share the memory"
    assert four.kv_cache_memory(lambda: None, 0.5).pool_bytes == (1 << 37) - (4 << 20)


def test_the_peak_of_a_call_is_measured() -> None:
    def take() -> None:
        taken = np.ones(64 << 20, np.uint8)
        del taken

    assert 60 << 20 < memory_module.peak_growth(take) < 80 << 20
    assert memory_module.peak_growth(lambda: None) < 8 << 20


def test_everything_is_done_at_once(platform: HostPlatformBody) -> None:
    def step() -> None: ...

    assert platform.device == torch.device("cpu")
    assert platform.buckets(256) == ()
    assert platform.capture(step, None) is step and platform.capture(step, CaptureKey(8)) is step
    host, out = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    platform.to_device(host, out)
    host.fill_(9)
    assert out.tolist() == [0, 1, 2]
    fetch = platform.to_host((out,))
    assert fetch.done() and fetch.wait()[0].tolist() == [0, 1, 2]
