"""The platform on a real GPU: the suite of the point, graphs that share memory, and what cannot be captured."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch

from engine.interfaces.context import WorkerContext
from engine.interfaces.platform import CaptureKey, Trial
from engine.types.errors import ContractError, DeviceMemoryError, KVCacheTooSmallError
from engine_cuda.platform_cuda.card import CudaPlatformOptions
from engine_sdk.conformance import PlatformConformance
from engine_sdk.conformance.core_contexts import start_message
from engine_sdk.conformance.whole_steps import check_whole_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


class TestPlatform(PlatformConformance):
    driver = "cuda"


class TestPlatformThatInsists(PlatformConformance):
    driver, options = "cuda", {"capture": "always", "buckets": [4, 16]}


def platform(**options: Any) -> Any:
    from engine_cuda.platform_cuda.body import CudaPlatformBody

    return CudaPlatformBody(WorkerContext(start=start_message("cuda"), options=CudaPlatformOptions(**options)))


def test_whole_steps_are_what_the_suite_asks_for() -> None:
    assert check_whole_steps(platform(capture="always", capture_whole="auto"))


class Model:
    """A step on fixed buffers: ids [R] -> logits [R, vocab], with products of matrices."""

    def __init__(self, rows: int, vocab: int = 50, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.table = torch.randn(50, 64, device="cuda", generator=generator).to(dtype)
        self.head = torch.randn(64, vocab, device="cuda", generator=generator).to(dtype)
        self.ids = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.left: tuple[torch.Tensor, ...] = ()

    def forward(self) -> None:
        hidden = torch.nn.functional.silu(self.table.index_select(0, self.ids))
        logits = (hidden @ self.head).float()
        self.left = hidden, logits, logits.isnan().any(dim=1)

    def prepare(self, number: int) -> None:
        self.ids.copy_((torch.arange(len(self.ids)) * 7 + 20 * number) % 50)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.left = tensors

    @property
    def trial(self) -> Trial:
        return Trial(self.prepare, lambda: self.left, self.replace)


def test_graphs_of_all_buckets_share_their_memory() -> None:
    """Captured from the largest down, 20 buckets with 32 MiB of logits each take little more than the first, and every
    one of them gives what the step gives, in any order."""
    made, vocab = platform(capture="always"), 131_072
    steps: dict[int, Any] = {}
    taken = []
    for rows in range(64, 0, -3):
        model = Model(rows, vocab)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        replay = made.capture(model.forward, CaptureKey(rows), model.trial)
        taken.append(torch.cuda.memory_reserved() - before)
        steps[rows] = (model, replay, Model(rows, vocab))
    assert sum(taken[1:]) < taken[0], f"bytes taken by each: {taken}"  # apart they would take ten times as much
    for rows in (64, 1, 31, 64, 4):
        model, replay, eager = steps[rows]
        for number in (3, 4):
            model.prepare(number)
            eager.prepare(number)
            replay()
            eager.forward()
            for ours, theirs in zip(model.left, eager.left, strict=True):
                assert torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("synchronisation", lambda model: model.ids.sum().item()),
        ("synchronisation", lambda model: model.ids.nonzero()),
        ("copy between|synchronisation", lambda model: torch.zeros(3).to("cuda")),
        ("copies from the host", lambda model: model.upload()),
    ],
)
def test_what_cannot_be_captured(what: str, spoil: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is named with its line; where the option does not insist, the step runs as it is, and later ones can still be
    captured."""
    insists = platform(capture="always")
    model = Model(4)
    plain = model.forward
    model.upload = lambda: insists.to_device(torch.zeros(4, dtype=torch.int32), model.ids)  # type: ignore[attr-defined]

    def forward() -> None:
        plain()
        spoil(model)

    with pytest.raises(ContractError, match=what) as caught:
        insists.capture(forward, CaptureKey(4), model.trial)
    if "host" not in what:
        assert "test_platform_gpu.py" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert platform().capture(forward, CaptureKey(4), model.trial) is forward
    assert "decode steps are not captured" in caplog.text
    model.prepare(2)
    forward()
    replay = insists.capture(plain, CaptureKey(4), model.trial)
    assert replay is not plain
    replay()
    torch.randn(4, device="cuda")  # torch's own generator does not take itself to be recorded any more
    torch.cuda.synchronize()


def test_what_an_earlier_engine_left_is_free_for_the_next() -> None:
    """A second engine of a process finds the memory that its own pool is to have."""
    torch.cuda.empty_cache()
    left = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    del left
    platform()
    assert torch.cuda.memory_reserved() <= before - (4 << 30)


def test_nobody_waits() -> None:
    """Copies to the device and back return while the device is still busy."""
    made = platform()
    x = torch.randn(8192, 8192, device="cuda")
    host, out = torch.arange(1000), torch.zeros(1000, dtype=torch.int64, device="cuda")
    made.to_device(host, out)
    made.to_host((out,)).wait()  # the first one makes pinned memory, which may wait for the device
    torch.cuda.synchronize()
    for _ in range(20):
        x = x @ x * 1e-4
    behind = torch.cuda.Event()
    behind.record()
    made.to_device(host, out)
    fetch = made.to_host((out,))
    assert not behind.query(), "the device was done already: nothing was shown"
    assert not fetch.done()
    assert torch.equal(fetch.wait()[0], host) and behind.query()


def test_results_do_not_hold_up_the_next_step() -> None:
    """A copy to the host waits for the work before it, and not for that behind it."""
    made = platform()
    out, x = torch.zeros(1000, device="cuda"), torch.randn(8192, 8192, device="cuda")
    made.to_host((out + 1,)).wait()
    torch.cuda.synchronize()
    fetch = made.to_host((out + 1,))
    for _ in range(20):
        x = x @ x * 1e-4
    behind = torch.cuda.Event()
    behind.record()
    assert fetch.wait()[0].eq(1).all()
    assert not behind.query(), "the fetch has waited for the work behind it"
    torch.cuda.synchronize()


def test_memory_that_is_not_there() -> None:
    """Of a pool, and of a largest step: typed errors that say how much."""
    made = platform()
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(
        KVCacheTooSmallError, match=rf"\({2 * total:,} bytes\).*bytes of cuda:0 are free.*--kv-cache-memory"
    ):
        made.allocate_pool(2, total)

    def largest_step() -> None:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")

    with pytest.raises(DeviceMemoryError, match="run a largest step beside the weights.*Tried to allocate"):
        made.kv_cache_memory(largest_step, None)
