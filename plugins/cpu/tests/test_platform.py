"""The platform: what it captures gives the same bits, what it cannot it refuses, and a baked-in value is found."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_ops import driver, random

from engine.interfaces.platform import CaptureKey, PlatformNeed, Trial
from engine.types.errors import ContractError
from engine.types.start import Seat

card = pytest.importorskip("engine_cpu.platform_cpu.card", reason="engine-cpu is not installed")


def platform(**options: Any) -> Any:
    pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    from engine_cpu.platform_cpu.body import CpuPlatformBody

    start = SimpleNamespace(device="cpu", seat=Seat())
    return CpuPlatformBody(SimpleNamespace(options=card.CpuPlatformOptions(**options), start=start))


class Model:
    """A step on fixed buffers: ids [4] -> logits [4, 50], by native operations."""

    def __init__(self, level: str = "scalar", dtype: torch.dtype = torch.float32) -> None:
        self.ops = driver(level)
        self.ids = torch.zeros(4, dtype=torch.int32)
        self.table = random(50, 32, dtype=dtype)
        self.norm = random(32, dtype=dtype, seed=1)
        self.up = self.ops.pack_linear(random(64, 32, dtype=dtype, seed=2), random(64, dtype=dtype, seed=3))
        self.head = self.ops.pack_linear(random(50, 32, dtype=dtype, seed=4), None)
        self.logits = torch.empty(0)

    def forward(self) -> None:
        x = self.ops.embedding(self.ids, self.table)
        x = self.ops.silu_mul(self.ops.linear(self.ops.rms_norm(x, self.norm, 1e-5), self.up))
        self.logits = self.ops.linear(x, self.head)

    def prepare(self, number: int) -> None:
        self.ids.copy_(torch.tensor([3, 1, 4, 1]) + 20 * number)

    @property
    def trial(self) -> Trial:
        return Trial(self.prepare, lambda: (self.logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16"])
def test_a_replay_gives_the_same_bits(native: Any, level: str, dtype: torch.dtype) -> None:
    if level not in native.levels():
        pytest.skip(f"this processor, or the compiler, has no {level}")
    model, eager = Model(level, dtype), Model(level, dtype)
    step = platform(capture="always").capture(model.forward, CaptureKey(4), model.trial)
    assert step is not model.forward and step.tape.names[:2] == ["gather_rows", "norm"]
    logits = model.logits
    for seed in range(20):
        ids = torch.randint(0, 50, (4,), generator=torch.Generator().manual_seed(seed))
        model.ids.copy_(ids)
        eager.ids.copy_(ids)
        step()
        eager.forward()
        assert torch.equal(logits, eager.logits)


def test_a_torch_operation_is_refused_by_name_and_line() -> None:
    model = Model()
    plain = model.forward

    def forward() -> None:
        plain()
        model.logits = model.logits.view(2, 100).transpose(0, 1)  # views are well
        model.logits = model.logits * 2  # the offending line

    line = forward.__code__.co_firstlineno + 3
    with pytest.raises(ContractError, match=rf"aten\.mul.*test_platform\.py:{line} .*forward"):
        platform(capture="always").capture(forward, CaptureKey(4), model.trial)
    with pytest.raises(ContractError, match=r"aten\.zeros|aten\.fill|aten\.zero_"):
        platform(capture="always").capture(lambda: setattr(model, "logits", torch.zeros(4)), CaptureKey(4))
    with pytest.raises(ContractError, match=r"aten\."):  # the driver's own way round, a copy
        platform(capture="always").capture(
            lambda: model.ops.rms_norm(model.table.T, model.norm[:1], 1e-5), CaptureKey(4)
        )


def test_rows_that_do_not_lie_densely_are_refused() -> None:
    """Torch copies them, which a captured step would lose."""
    model, x = Model(), torch.zeros(32, 70).T
    with pytest.raises(ContractError, match=r"aten\.(clone|contiguous|copy)"):
        platform(capture="always").capture(
            lambda: setattr(model, "logits", model.ops.linear(x, model.up)), CaptureKey(70)
        )


def test_a_baked_in_value_is_found() -> None:
    """A driver that reads a changing value when it launches, and not when it runs."""
    model = Model()
    plain = model.forward

    def forward() -> None:
        plain()
        model.logits = model.ops.scale(model.logits, 1.0 + model.ids.numpy()[0])

    with pytest.raises(ContractError, match=r"replayed on input 1.*kept a value.*\(6 calls: gather_rows, norm,"):
        platform(capture="always").capture(forward, CaptureKey(4), model.trial)


def test_a_buffer_that_moves_is_found() -> None:
    """What the step reads lies elsewhere the next time."""
    model = Model()
    plain, moving = model.forward, [torch.ones(4, 50)]

    def forward() -> None:
        plain()
        model.logits = model.ops.add(model.logits, moving[0])

    def prepare(number: int) -> None:
        model.prepare(number)
        moving.insert(0, torch.full((4, 50), float(number)))  # where it lay stays memory that can be read

    with pytest.raises(ContractError, match="replayed on input 1"):
        platform(capture="always").capture(forward, CaptureKey(4), Trial(prepare, lambda: (model.logits,)))


def test_auto_goes_without_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()

    def forward() -> None:
        model.logits = torch.relu(model.table)

    with caplog.at_level(logging.WARNING):
        assert platform().capture(forward, CaptureKey(4), model.trial) is forward
    assert "aten.relu" in caplog.text and "not captured" in caplog.text
    assert platform(capture="never").capture(model.forward, CaptureKey(4), model.trial) == model.forward
    assert platform().capture(model.forward, None) == model.forward


def test_the_memory_of_a_captured_step_is_kept() -> None:
    """Tensors that nobody else holds any more stay the tape's."""
    model, eager = Model(), Model()
    step = platform(capture="always").capture(model.forward, CaptureKey(4), model.trial)
    logits = model.logits
    for _ in range(50):
        others = [torch.full((4, 64), torch.nan) for _ in range(20)]  # would take freed memory
        step()
        assert all(other.isnan().all() for other in others)
    eager.ids.copy_(model.ids)
    eager.forward()
    assert torch.equal(logits, eager.logits)


def test_buckets() -> None:
    assert platform().buckets(1) == (1,)
    assert platform().buckets(3) == (3,)
    assert platform().buckets(64) == (64,)
    assert platform().buckets(256) == (64,)
    assert platform().buckets(256, 3) == (5,) and platform().buckets(2, 3) == (2,) and platform().buckets(8, 17) == ()
    assert platform(capture="never").buckets(256) == ()


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        platform()
        assert torch.get_num_threads() == before
        platform(threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    for wrong in (0, -1, 256, "many"):
        with pytest.raises(ValueError, match="threads"):
            card.CpuPlatformOptions(threads=wrong)


def test_memory_and_copies() -> None:
    pool = platform().allocate_pool(3, 100)
    assert (pool.shape, pool.dtype, int(pool.sum())) == ((3, 100), torch.uint8, 0)
    host, out = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    platform().to_device(host, out)
    fetch = platform().to_host((out,))
    assert fetch.done() and fetch.wait()[0].tolist() == [0, 1, 2]
    found = platform().kv_cache_memory(lambda: None, None)
    assert 0 < found.pool_bytes <= 4 << 30


def test_card(native: Any) -> None:
    assert card.CpuPlatform.unsupported(PlatformNeed()) == []
    assert card.CpuPlatform.unsupported(PlatformNeed(dtype="bfloat16")) == []
    assert "int4" in card.CpuPlatform.unsupported(PlatformNeed(dtype="int4"))[0]
    facts = card.CpuPlatform.describe()
    assert facts.device == "cpu" and "cores" in facts.name and "bfloat16" in facts.dtypes


def test_without_the_native_module(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"engine_cpu._native": None, "engine_cpu": None}
    monkeypatch.setattr(importlib.util, "find_spec", specs.__getitem__)
    (reason,) = card.CpuPlatform.unsupported(PlatformNeed())
    assert "native module is not built" in reason


def test_a_drafter_s_step_is_captured_with_its_rows() -> None:
    """What runs stands in the key too; a replay may leave rows out, whatever runs."""
    model = Model()
    step = platform(capture="always").capture(model.forward, CaptureKey(4, of="draft", variant=("deep",)), model.trial)
    logits = model.logits
    before = logits.clone()
    model.ids.copy_((model.ids + 7) % 50)
    step(2)
    assert torch.equal(logits[2:], before[2:]) and not torch.equal(logits[:2], before[:2])
