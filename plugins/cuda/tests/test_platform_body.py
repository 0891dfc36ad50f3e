"""The parts of the platform's body that need no GPU: buckets, places of ranks, arithmetic, the ring, trials."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.interfaces.ops import OpsCard, StepTables
from engine.types.errors import ConfigError, ContractError, UnfitDriverError
from engine.types.parallel import Parallel
from engine.types.start import Seat
from engine_cuda.platform_cuda.body import (
    CudaPlatformBody,
    device_index,
    draft_graphs,
    most_drafts,
    most_mixed,
    unrecorded,
)
from engine_cuda.platform_cuda.buckets import hidden_tokens, row_buckets, token_buckets
from engine_cuda.platform_cuda.card import CudaPlatformOptions
from engine_cuda.platform_cuda.graphs import Graphs
from engine_cuda.platform_cuda.late import LateKernels, late_kernels
from engine_cuda.platform_cuda.memory import GRAPH_BYTES, Measured, cache_memory, graph_bytes
from engine_cuda.platform_cuda.staging import StagingRing
from engine_cuda.platform_cuda.trial import compare, culprit, what_stopped

GIB = 1 << 30


def test_buckets() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(7) == (1, 2, 4, 7)
    assert row_buckets(33) == (1, 2, 4, 8, 16, 24, 32, 33)
    assert row_buckets(256) == (1, 2, 4, *range(8, 257, 8))
    assert row_buckets(512)[-17:] == (256, *range(272, 513, 16)) and row_buckets(4096) == row_buckets(512)
    assert row_buckets(64, None, 5) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert row_buckets(256, None, 5)[-1] == 96 and row_buckets(300, None, 513) == ()
    assert row_buckets(20, (64, 8, 32, 8)) == (8, 32) and row_buckets(100, (64, 8)) == (8, 64)


def test_buckets_of_steps_with_prompts() -> None:
    """None holds more tokens than a step can have; the largest step is one where it is small."""
    assert token_buckets(8192) == (*range(64, 513, 64), *range(640, 1025, 128)) and token_buckets(512)[-2:] == (
        448,
        512,
    )
    assert token_buckets(200) == (64, 128, 192, 200) and token_buckets(64) == (64,) and token_buckets(5) == (5,)
    assert token_buckets(1) == () and token_buckets(600, (1024, 256, 96)) == (96, 256)


def test_steps_that_can_have_prompts() -> None:
    """Requests of two tokens have prompts of one: their steps are those of decodes, and no other is captured."""

    def most(length: int) -> int:
        start = SimpleNamespace(max_model_len=length, max_num_seqs=256, max_num_batched_tokens=2048)
        return most_mixed(start)  # type: ignore[arg-type]

    assert [most(length) for length in (1, 2, 3, 4096)] == [0, 0, 512, 2048]
    assert token_buckets(most(2)) == token_buckets(most(2), (64, 128)) == ()


def test_steps_are_captured_as_far_as_the_host_is_slower() -> None:
    """0.6B, 4B and 8B models, and one of 70B on eight GPUs."""
    assert hidden_tokens(1024, 1) > 1024 and 400 < hidden_tokens(2560, 1) < 600
    assert 190 < hidden_tokens(4096, 1) < 210 and 350 < hidden_tokens(8192, 8) < 450
    assert token_buckets(8192, None, hidden_tokens(4096, 1)) == (64, 128, 192)
    assert token_buckets(8192, None, 5) == (64, 128) and token_buckets(100, None, 5) == (64, 100)
    assert token_buckets(8192, (700,), 5) == (700,)


def test_places_of_ranks() -> None:
    def place(rank: int, size: int, per_device: int, devices: int, of: tuple[int, int] = (0, 1)) -> tuple[int, int]:
        start = SimpleNamespace(seat=Seat(device=of[0] * size + rank, sharers=of[1] * size))
        return device_index(start, per_device, devices)  # type: ignore[arg-type]

    assert [place(rank, 4, 1, 8) for rank in range(4)] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [place(rank, 2, 1, 4, (1, 2)) for rank in range(2)] == [(2, 1), (3, 1)]
    assert [place(rank, 3, 2, 2) for rank in range(3)] == [(0, 2), (0, 2), (1, 1)]
    with pytest.raises(ConfigError, match="run 4 ranks on GPUs; 2 visible, for 1 rank each; lower --tensor") as caught:
        place(0, 2, 1, 2, (0, 2))
    assert "--platform.ranks_per_device" in caught.value.remedy


def test_drafts_are_known_by_the_manifest() -> None:
    def start(*choices: tuple[str, dict[str, int]]) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(point=point, options=options) for point, options in choices])

    assert most_drafts(start(("attention", {"num_tokens": 9}))) == 0
    assert most_drafts(start(("attention", {}), ("drafter", {"num_tokens": 3}))) == 3
    models: Any = SimpleNamespace(drafts=[SimpleNamespace(features=width) for width in (0, 64, 64)])
    assert draft_graphs(models) == 2 + 1 + 1


def test_memory_of_a_pool() -> None:
    """An 80 GiB device with 16 GiB of weights, a step of 2 and libraries of 1: 0.9 * 80 - 16 - 1 - 2."""
    measured = Measured(80 * GIB, 60 * GIB, 16 * GIB, 1 * GIB, 2 * GIB)
    assert cache_memory(measured, 0.5, 1, 0) == ((40 - 16 - 1 - 2) * GIB, 2 * GIB)
    assert cache_memory(measured, None, 1, GIB).pool_bytes == int(80 * GIB * 0.9) - (16 + 1 + 2 + 1) * GIB
    assert cache_memory(measured, 1.0, 1, 0).pool_bytes == 58 * GIB  # what is free is less
    assert cache_memory(measured, 0.5, 2, 0).pool_bytes == (20 - 16 - 2) * GIB
    assert cache_memory(measured, 0.1, 1, 0).pool_bytes < 0
    assert graph_bytes(2 * GIB, {1: ()}, 64) == 0
    assert graph_bytes(2 * GIB, {1: (1, 32)}, 64) == GIB + 2 * GRAPH_BYTES
    assert graph_bytes(2 * GIB, {1: (1, 64)}, 64) == graph_bytes(2 * GIB, {1: (1, 80)}, 64) == 2 * GIB + 2 * GRAPH_BYTES
    assert graph_bytes(2 * GIB, {1: (1, 64), 5: (1, 2, 64)}, 64) == 10 * GIB + 5 * GRAPH_BYTES


class Device:
    """A device that reads staged memory when it is told to, stream by stream."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.waits = 0

    def copy(self, stream: str, source: torch.Tensor, out: torch.Tensor) -> None:
        self.queued.append((stream, source, out))

    def record(self, stream: str) -> SimpleNamespace:
        behind = [copy for copy in self.queued if copy[0] == stream]

        def synchronize() -> None:
            self.waits += any(any(copy is other for other in self.queued) for copy in behind)
            for copy in behind:
                self.run(copy)

        return SimpleNamespace(synchronize=synchronize)

    def run(self, copy: tuple[str, torch.Tensor, torch.Tensor]) -> None:
        if any(copy is other for other in self.queued):
            self.queued = [other for other in self.queued if other is not copy]
            copy[2].copy_(copy[1])


@pytest.mark.parametrize("lag", [0, 3, 1000])
def test_staged_memory_is_not_written_before_it_was_read(lag: int) -> None:
    """A device that is `lag` copies behind still finds each copy's own bytes; it is waited for only where it is as far
    behind as the ring is long."""
    device = Device()
    ring = StagingRing(torch.zeros(4 * 256, dtype=torch.uint8), device.record, segments=4)
    assert ring.largest == 256
    generator, outs = torch.Generator().manual_seed(0), []
    for number in range(200):
        host = torch.full((int(torch.randint(1, 257, (), generator=generator)),), number, dtype=torch.uint8)
        stream = "capture" if number % 50 > 40 else "main"
        staged, out = ring.take(len(host), stream), torch.zeros_like(host)
        staged.copy_(host)
        device.copy(stream, staged, out)
        outs.append(out)
        while len(device.queued) > lag:
            device.run(device.queued[0])
    for copy in list(device.queued):
        device.run(copy)
    assert all((out == number).all() for number, out in enumerate(outs))
    assert (device.waits > 0) == (lag == 1000)


def test_pieces_can_hold_any_dtype() -> None:
    ring = StagingRing(
        torch.zeros(4096, dtype=torch.uint8), lambda stream: SimpleNamespace(synchronize=lambda: None), 2
    )
    for dtype, shape in ((torch.int64, (3, 5)), (torch.bool, ()), (torch.float32, (7,)), (torch.int32, (2, 1))):
        piece = ring.take(torch.Size(shape).numel() * dtype.itemsize, "main")
        assert piece.view(dtype).view(shape).shape == shape


def test_what_a_trial_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, logits = (torch.randn(4, n, generator=generator) * 10 for n in (8, 30))
    hidden, broken = hidden.bfloat16(), torch.zeros(4, dtype=torch.bool)
    nan = logits.clone()
    nan[1, 2] = torch.nan
    compare((hidden, logits, broken), (hidden.clone(), logits.clone(), broken.clone()), 0)
    compare((hidden, logits + 0.1, broken), (hidden, logits, broken), 0)  # within what a bfloat16 model rounds
    compare((nan,), (nan.clone(),), 1)
    outlier = hidden.clone()
    outlier[0, 3] = 5000.0
    swapped = outlier.clone()
    swapped[2] = outlier[1]
    compare((outlier + 0.3,), (outlier,), 0)
    tiny = torch.cat((logits, logits[:1] * 1e-9))
    compare((torch.cat((logits, logits[1:2] * 1e-9)),), (tiny,), 0)
    for found, expected, words in (
        ((hidden, logits + 1.5, broken), (hidden, logits, broken), r"output 1 .*a difference of 1\.5"),
        ((hidden, logits, ~broken), (hidden, logits, broken), "output 2 .*4 elements differ"),
        ((nan,), (logits,), "output 0 .*NaN"),
        ((logits + 0.1,), (logits,), r"output 0 .*a difference of 0\.1"),  # a float32 model rounds less
        ((swapped,), (outlier,), r"output 0 .*row 2 lies"),
        ((logits[:2],), (logits,), r"output 0 .*shape \[2, 30\] for \[4, 30\]"),
    ):
        with pytest.raises(ContractError, match=rf"replayed on input 1, its {words}"):
            compare(found, expected, 1)


def test_what_could_not_be_recorded() -> None:
    """By CUDA's and torch's messages, as torch 2.11 words them."""
    for message, what in {
        "CUDA error: operation not permitted when stream is capturing\nSearch for": "a synchronisation with the host",
        "CUDA error: operation failed due to a previous error during capture": "operation failed due to a previous",
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor": "a copy between",
        "CUDA error: operation would make the legacy stream depend on a capturing blocking stream": "default stream",
        "something else\nmore": "something else",
    }.items():
        assert what in what_stopped(message) and "\n" not in what_stopped(message)

    def step() -> None:
        torch.zeros(2).view(3)

    try:
        step()
    except RuntimeError as error:
        line = step.__code__.co_firstlineno + 1
        assert culprit(error).endswith(f"test_platform_body.py:{line} (test_what_could_not_be_recorded.<locals>.step)")


class Allocators:
    """Torch's two, as CUDA graphs meet them: neither records to a pool that it records to already, nor to one whose
    last graph has gone."""

    def __init__(self) -> None:
        self.pools = 0
        self.device = set[int]()
        self.pinned = set[int]()
        self.users = dict[int, int]()
        self.generator_recorded = False

    def handle(self) -> int:
        self.pools += 1
        return self.pools

    def release(self, index: int, pool: int) -> None:
        self.users[pool] -= 1


class Graph:
    """Torch's CUDAGraph. Where CUDA has given a recording up, its end raises before the allocators are told."""

    def __init__(self, allocators: Allocators) -> None:
        self.allocators = allocators
        self.pool = 0
        self.given_up = False
        self.made = False

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.pool, users = pool, self.allocators.users
        if users.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        users[pool] = users.get(pool, 0) + 1
        for recorded in (self.allocators.device, self.allocators.pinned):
            if pool in recorded:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            recorded.add(pool)
        self.allocators.generator_recorded = True

    def capture_end(self) -> None:
        if self.given_up:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.allocators.device.remove(self.pool)
        self.allocators.pinned.remove(self.pool)
        self.allocators.generator_recorded = False
        self.made = True

    def __del__(self) -> None:
        if self.made:
            self.allocators.release(0, self.pool)


def test_others_are_recorded_after_one_that_failed_or_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs share a pool while one of them lives; a recording that CUDA gave up leaves torch's pool unusable."""
    allocators, made = Allocators(), list[Graph]()

    def graph() -> Graph:
        made[:] = [Graph(allocators)]
        return made[0]

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", allocators.handle)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    told = {"_cuda_endAllocateToPool": lambda index, pool: allocators.device.remove(pool)}
    for name, function in (told | {"_cuda_releasePool": allocators.release}).items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    graphs = Graphs(torch.device("cuda", 0))

    def waits() -> None:
        made[0].given_up = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def record() -> int:
        """Its pool; it is gone at once."""
        graphs._record(lambda: None)
        return made.pop().pool

    first, kept = record(), graphs._record(lambda: None)
    pool = made[0].pool
    assert record() == record() == pool != first
    with pytest.raises(ContractError, match="a synchronisation with the host"):
        graphs._record(waits)
    assert not allocators.generator_recorded, "torch draws random numbers again"
    made.clear()
    del kept
    assert set(allocators.users.values()) == {0}, "nothing is held"
    assert len({record(), record(), pool, first}) == 4
    assert not allocators.device and allocators.pinned == {pool}


def test_memory_is_asked_for_when_an_earlier_engine_has_given_back_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def asked(device: torch.device) -> Any:
        done.append("asked")
        raise RuntimeError("no more of this")

    for name in ("init", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    start = SimpleNamespace(
        parallel=Parallel(),
        seat=Seat(),
        max_num_seqs=1,
        model=SimpleNamespace(hidden_size=64),
        max_num_batched_tokens=8,
        max_model_len=8,
        choices=(),
        drafts=(),
        device="cuda",
    )
    with pytest.raises(UnfitDriverError, match="no more of this"):
        CudaPlatformBody(SimpleNamespace(options=CudaPlatformOptions(), start=start))  # type: ignore[arg-type]
    assert done == ["init", "cuda:0", "synchronize", "empty_cache", "asked"]


@pytest.fixture
def body(monkeypatch: pytest.MonkeyPatch) -> CudaPlatformBody:
    """Asked for whole steps, on a device of 80 GiB of which torch has nothing."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    made = object.__new__(CudaPlatformBody)
    more = {"mode": "auto", "whole": True, "asked_buckets": (1, 2, 4), "asked_mixed": "never", "max_num_seqs": 4}
    more |= {"unrecorded": [], "most_drafts": 0, "draft_graphs": 0, "ranks": 1, "outside": 0}
    more |= {"device": torch.device("cpu")}
    for name, value in more.items():
        setattr(made, f"_{name}", value)
    return made


@pytest.mark.parametrize("why_not", [[], ["attention is planned by the host"]], ids=str)
def test_memory_is_kept_for_whole_steps_where_they_can_be(
    body: CudaPlatformBody, why_not: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Both are known by the largest step. Its draws are fetched, yet what is compiled behind it is a start's."""
    pytest.importorskip("triton", reason="Triton is not installed")
    tables, body._graphs = StepTables(torch.zeros(5, 9, dtype=torch.int32), (), ()), Graphs.__new__(Graphs)
    made = []

    def largest_step() -> None:
        late_kernels.serving = True
        made.append(body.whole_steps(None, tables, None, why_not))  # type: ignore[arg-type]

    taken = 80 * GIB * 9 // 10 - body.kv_cache_memory(largest_step, 0.9).pool_bytes
    assert taken == GRAPH_BYTES * (3 if why_not else 6) and not late_kernels.serving
    body._draft_graphs = 2
    assert 80 * GIB * 9 // 10 - body.kv_cache_memory(lambda: None, 0.9).pool_bytes == taken + 2 * 3 * GRAPH_BYTES
    assert (made == [None]) == bool(why_not) == ("planned by the host" in caplog.text)
    again = body.whole_steps(None, tables, None, why_not)  # type: ignore[arg-type]
    assert (again is None) == bool(why_not) and len(caplog.records) == len(why_not)


def test_whole_steps_that_cannot_be_are_refused_where_captures_are_insisted_on(
    body: CudaPlatformBody, caplog: pytest.LogCaptureFixture
) -> None:
    body._mode = "never"
    assert body.whole_steps(None, None, None, ()) is None  # type: ignore[arg-type]
    assert "platform.capture is never" in caplog.text
    body._mode = "always"
    body._whole = True
    with pytest.raises(ConfigError, match="is planned by the host; start with --platform.capture_whole never"):
        body.whole_steps(None, None, None, ["attention is planned by the host"])  # type: ignore[arg-type]
    body._whole = False
    assert body.whole_steps(None, None, None, ["attention is planned by the host"]) is None  # type: ignore[arg-type]


def test_kernels_that_are_compiled_late(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Those of a start are not told, nor what lies in Triton's cache; who listened before goes on listening."""
    knobs = pytest.importorskip("triton.knobs")
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **given: heard.append(given["src"].name))
    late, given = LateKernels(), {"metadata": {}, "metadata_group": {}}
    late.listen()
    late.listen()
    assert knobs.compilation.listener is late
    for serving, name, cached in ((False, "early", False), (True, "found", True), (True, "tile", False)):
        late.serving = serving
        source = SimpleNamespace(name=name)
        knobs.compilation.listener(src=source, times=SimpleNamespace(total=1_500_000), cache_hit=cached, **given)
    assert heard == ["early", "found", "tile"] and late.seen == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("kernel tile was compiled while requests were computed, which waited 1.5 s")
    knobs.compilation.listener = lambda **given: late(**given)  # who came later, and calls it
    late.listen()
    assert not late.serving
    knobs.compilation.listener(src=source, times=None, cache_hit=False, **given)
    assert heard[3:] == ["tile"]


class FarOps(OpsCard):
    """What it launches is seen by nobody."""

    captured_by = frozenset()


def test_draws_that_no_graph_holds_speak_against_whole_steps(body: CudaPlatformBody) -> None:
    """The model's own operations are asked about where steps are captured at all."""
    start: Any = SimpleNamespace(
        choices=[
            SimpleNamespace(point=point, kind=kind, driver=driver, value=value)
            for point, kind, driver, value in (
                ("ops", "linear", "far", "test_platform_body:FarOps"),
                ("ops", "draw", "far", "test_platform_body:FarOps"),
                ("ops", "place_tokens", "far", "test_platform_body:FarOps"),
                ("ops", "prepare_inputs", "near", "engine.interfaces.ops:OpsCard"),
                ("attention", "draw", "far", "test_platform_body:FarOps"),
            )
        ]
    )
    body._unrecorded = unrecorded(start)
    body._mode = "always"
    why = re.escape("ops 'far' (draw, place_tokens) is not recorded by 'stream'; start with")
    with pytest.raises(ConfigError, match=why):
        body.whole_steps(None, None, None, [])  # type: ignore[arg-type]
