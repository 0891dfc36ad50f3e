"""Building a worker: order, manifest, needs, the pool's size, hooks, futures."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harness
import msgspec
import numpy as np
import pytest
import torch
from harness import Driver, Request, choice, dense_logits, layout, params, prompt, registry, start_message, started

from engine.interfaces.executor import StepFuture
from engine.interfaces.ops import FURTHER_OPERATIONS, OPERATIONS, OpsNeed
from engine.interfaces.platform import CacheMemory
from engine.plugin import Registry
from engine.runner import assemble as assemble_module
from engine.runner import worker as worker_module
from engine.runner.assemble import assemble
from engine.runner.results import FailedStep, RunningStep
from engine.runner.worker import TorchWorker
from engine.types.errors import (
    ConfigError,
    ContractError,
    DeviceMemoryError,
    DriverImportError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    KVCacheTooSmallError,
    ManifestError,
    UnfitDriverError,
)
from engine.types.parallel import Parallel, places
from engine.types.plan import StepPlan, StepResult
from engine.types.start import WorkerReady
from engine_kit.dispatch_guard import DispatchGuard
from engine_kit.memory_profile import largest_step
from engine_reference.ops_torch.card import TorchOps
from engine_reference.ops_torch.ops import TorchOpsBody
from engine_reference.platform_host.platform import HostPlatformBody

PAGE = layout().page_bytes
HEARD: list[WorkerReady] = []


# -- the pool --------------------------------------------------------------------------------------------------------
def ready(**changes: Any) -> WorkerReady:
    return TorchWorker(start_message(**changes), registry()).start()


def test_ready_says_what_was_taken() -> None:
    answer = ready(num_kv_pages=7)
    assert (answer.num_pages, answer.cache_bytes) == (7, 7 * PAGE)
    parameters = sum(tensor.numel() for _, tensor in harness.random_weights())
    assert (answer.num_parameters, answer.weight_bytes) == (parameters, parameters * 8)
    assert 0 < answer.load_seconds < 60


def test_pool_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ready(num_kv_pages=None, kv_cache_memory=5 * PAGE + 17).num_pages == 5
    assert ready(num_kv_pages=3, kv_cache_memory=5 * PAGE).num_pages == 3
    asked: list[float | None] = []

    def memory(self: HostPlatformBody, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        largest_step()
        asked.append(utilization)
        return CacheMemory(9 * PAGE, 77)

    monkeypatch.setattr(HostPlatformBody, "kv_cache_memory", memory)
    answer = ready(num_kv_pages=None, memory_utilization=0.5)
    assert (answer.num_pages, answer.step_bytes, asked) == (9, 77, [0.5])
    assert ready(num_kv_pages=7).step_bytes is None and len(asked) == 1
    monkeypatch.setattr(HostPlatformBody, "kv_cache_memory", lambda *_: CacheMemory(-5, 77))
    with pytest.raises(KVCacheTooSmallError, match="77 bytes for steps"):
        ready(num_kv_pages=None)


def test_a_stage_that_caches_nothing_leaves_the_number_of_pages_to_the_others() -> None:
    start = start_message(num_kv_pages=None)
    empty = msgspec.structs.replace(start, layout=layout().on_stage([]))
    assert worker_module._profile(empty, None) is None  # type: ignore[arg-type]
    assert worker_module._num_pages(empty, None) == 2**31 - 1
    asked = msgspec.structs.replace(empty, num_kv_pages=7)
    assert worker_module._num_pages(asked, None) == 7
    assert allocated(worker_module._num_pages(empty, None), 0).shape == (2**31 - 1, 0)
    nothing = msgspec.structs.replace(layout(), page_bytes=0, tables=(), groups=())
    assert worker_module._num_pages(msgspec.structs.replace(start, layout=nothing), None) == 2


def allocated(num_pages: int, page_bytes: int) -> torch.Tensor:
    """A pool as the reference platform has it."""
    return HostPlatformBody.allocate_pool(HostPlatformBody.__new__(HostPlatformBody), num_pages, page_bytes)


def test_memory_that_ends_while_the_worker_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: HostPlatformBody, num_pages: int, page_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("Device out of memory. Tried to allocate 2.00 GiB. 1.00 GiB is free. Advice.")

    monkeypatch.setattr(HostPlatformBody, "allocate_pool", full)
    with pytest.raises(DeviceMemoryError, match=r"start the engine; Device .* 1\.00 GiB is free; lower --max-num-seqs"):
        ready(num_kv_pages=7)


@pytest.mark.parametrize(
    ("seqs", "budget", "length"), [(1, 1, 8), (1, 100, 8), (4, 3, 8), (4, 40, 64), (4, 40, 8), (4, 9, 8), (8, 30, 8)]
)
def test_the_largest_step_is_as_large_as_a_step_may_be(seqs: int, budget: int, length: int) -> None:
    start = start_message(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=length)
    plan = largest_step(start)
    assert plan.num_rows <= seqs and plan.num_tokens.max() < length and plan.samples.all()
    assert plan.total_tokens == min(budget, seqs * (length - 1))
    assert plan.num_rows == min(seqs, budget) and (plan.num_tokens[: plan.num_decodes] == 1).all()
    assert (np.diff(plan.num_tokens) >= 0).all()


def test_a_profile_is_taken_where_nothing_is_said_of_the_pool() -> None:
    """How much it finds depends on what the process had freed before, so little is promised of the number."""
    answer = ready(num_kv_pages=None, max_num_seqs=64, max_num_batched_tokens=256)
    assert answer.step_bytes is not None and 0 <= answer.step_bytes < 1 << 32
    assert answer.num_pages > 2 and ready(num_kv_pages=None, kv_cache_memory=5 * PAGE).step_bytes is None


@pytest.mark.parametrize("asked", [{"num_kv_pages": 1}, {"num_kv_pages": None, "kv_cache_memory": 2 * PAGE - 1}])
def test_pool_too_small(asked: dict) -> None:
    with pytest.raises(KVCacheTooSmallError, match=rf"that is 1 pages.*give at least {2 * PAGE:,} bytes"):
        ready(**asked)


# -- the manifest ----------------------------------------------------------------------------------------------------
def with_choice(point: str, **changes: Any) -> Any:
    message = start_message()
    choices = [msgspec.structs.replace(c, **changes) if c.point == point else c for c in message.choices]
    return msgspec.structs.replace(message, choices=tuple(choices))


@pytest.mark.parametrize(
    "changes", [{"version": "99"}, {"distribution": "other"}, {"value": "a:B"}, {"driver": "gone"}]
)
def test_manifest_is_checked(changes: dict) -> None:
    with pytest.raises(ManifestError, match="platform"):
        TorchWorker(with_choice("platform", **changes), registry()).start()


@pytest.mark.parametrize(
    ("left_out", "named"),
    [("platform", "platform"), ("checkpoint", "checkpoint"), ("attention", "sliding"), ("ops", "embedding")],
)
def test_manifest_is_complete(left_out: str, named: str) -> None:
    message = start_message()
    choices = tuple(c for c in message.choices if c.point != left_out)
    with pytest.raises(ManifestError, match=named):
        TorchWorker(msgspec.structs.replace(message, choices=choices), registry()).start()


def test_profiles_where_no_package_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = TorchWorker(start_message())
    with pytest.raises(InvalidRequestError, match="none is being taken"):
        worker.stop_profile()
    with pytest.raises(ConfigError, match="no folder for it; start the engine with --profile-dir"):
        worker.start_profile()
    monkeypatch.setattr("engine.plugin.loading.entry_points", lambda group: ())
    with pytest.raises(EngineError, match="take a profile; no installed package brings 'profiler'"):
        TorchWorker(start_message()).start_profile()


def test_other_processes_choices_are_theirs() -> None:
    """An executor or tokenizer that this process does not know is no matter of the worker's."""
    message = start_message()
    foreign = msgspec.structs.replace(message.choices[0], point="executor", driver="elsewhere")
    TorchWorker(msgspec.structs.replace(message, choices=(*message.choices, foreign)), registry()).start()


def test_needs_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[OpsNeed] = []

    def unsupported(need: OpsNeed) -> list[str]:
        asked.append(need)
        return ["the device has no rope"] if need.operation == "rope" else []

    monkeypatch.setattr(TorchOps, "unsupported", unsupported)
    with pytest.raises(UnfitDriverError, match=r"ops of 'rope'.*the device has no rope"):
        ready()
    assert all((need.dtype, need.device) == ("float64", "cpu") for need in asked)


def test_ranks_without_a_communicator_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 communicators"):
        ready(parallel=Parallel(tp=2), place=places(Parallel(tp=2), 2)[0])


# -- assembly --------------------------------------------------------------------------------------------------------
class HalfOps(TorchOps):
    """Some operations only."""

    operations = frozenset({"add", "sample"})
    body = "test_worker_ops:HalfOpsBody"


class HalfOpsBody(TorchOpsBody):
    def __init__(self, context: Any) -> None:
        assert context.platform is not None and context.ops is None and context.dtype == torch.float64


def test_each_operation_from_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "test_worker_ops", SimpleNamespace(HalfOpsBody=HalfOpsBody))
    candidate = harness.Candidate("ops", "half", 0, "harness", "1", "test_worker_ops:HalfOps")
    monkeypatch.setattr(__import__("sys").modules["test_worker_ops"], "HalfOps", HalfOps, raising=False)
    found = Registry.discover(extra=(harness.CHECKPOINT, candidate))
    message = start_message()
    choices = tuple(
        choice(found, "ops", "half", c.kind) if c.point == "ops" and c.kind in HalfOps.operations else c
        for c in message.choices
    )
    parts = assemble(msgspec.structs.replace(message, choices=choices), found)
    bodies = {name: getattr(parts.ops, name).__self__ for name in vars(parts.ops)}
    assert bodies.keys() == set(OPERATIONS) - set(FURTHER_OPERATIONS)
    assert isinstance(bodies["add"], HalfOpsBody) and bodies["add"] is bodies["sample"]
    assert not isinstance(bodies["linear"], HalfOpsBody) and bodies["linear"] is bodies["pack_linear"]


def test_a_drafter_may_not_ask_for_the_stream_of_a_layer_that_is_not_there() -> None:
    message = start_message()
    card = SimpleNamespace(needs=frozenset({"streams"}), streams=lambda target, options: (0, target.num_layers))
    options = SimpleNamespace(acceptance="exact", num_tokens=2)
    selection = SimpleNamespace(
        card=card, options=options, candidate=harness.Candidate("drafter", "far", 1, "s", "1", "x:X")
    )
    chosen: Any = SimpleNamespace(names=lambda point: ["far"], fit=lambda *asked: selection)
    with pytest.raises(ContractError, match=rf"'far' for drafter; .*layers .0, {message.model.num_layers}."):
        assemble_module._streams(message, chosen)


def test_a_card_that_raises_over_what_it_covers_is_named() -> None:
    def covers(*asked: Any) -> bool:
        raise KeyError("groups")

    message = start_message()
    model = msgspec.structs.replace(message.model, config={"quantization_config": {"quant_method": "x"}})
    selection = SimpleNamespace(
        card=SimpleNamespace(covers=covers), candidate=harness.Candidate("quantization", "odd", 0, "s", "1", "x:X")
    )
    chosen: Any = SimpleNamespace(fit=lambda *asked: selection)
    asked = assemble_module._covers(msgspec.structs.replace(message, model=model), chosen)
    assert asked is not None
    with pytest.raises(ContractError, match="'odd' for quantization.*KeyError") as caught:
        asked("model.layers.0.mlp", "linear")
    assert "covers model.layers.0.mlp" in str(caught.value)


def test_a_broken_body_is_named() -> None:
    candidate = harness.random_candidate("checkpoint", "broken", "BrokenCheckpoint")
    harness.BrokenCheckpoint = type("BrokenCheckpoint", (harness.RandomCheckpoint,), {"body": "harness:Nothing"})  # type: ignore[attr-defined]
    found = Registry.discover(extra=(candidate,))
    message = start_message()
    choices = tuple(c if c.point != "checkpoint" else choice(found, "checkpoint", "broken") for c in message.choices)
    with pytest.raises(DriverImportError, match="broken"):
        TorchWorker(msgspec.structs.replace(message, choices=choices), found).start()


def test_the_guard_wraps_what_the_runner_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole request with the model under the dispatch guard: it computes through ops and attention alone."""
    guard = DispatchGuard()
    context = assemble_module.ModelContext
    monkeypatch.setattr(assemble_module, "ModelContext", lambda **fields: guard.context(context(**fields)))
    worker = started()
    runner = worker._runner
    assert runner is not None
    forward = runner._forward

    def guarded(step: Any) -> None:
        with guard, guard_ops(guard, runner):
            forward(step)

    monkeypatch.setattr(runner, "_forward", guarded)
    request = Request(prompt(9), params(), slot=0)
    Driver(worker).alone(request, 4)
    assert request.outputs == dense_logits(request.tokens)[8:-1].argmax(dim=1).tolist()


class guard_ops:
    """The runner's own gather of rows goes through ops as well."""

    def __init__(self, guard: DispatchGuard, runner: Any) -> None:
        self.guard = guard
        self.runner = runner

    def __enter__(self) -> None:
        self.ops = self.runner._ops
        self.runner._ops = self.guard.wrap(self.ops)

    def __exit__(self, *error: object) -> None:
        self.runner._ops = self.ops


def test_the_driver_that_breaks_its_contract_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Any:
        raise ContractError("do it", "it did not", "another", point="platform")

    named = r"it did not \(driver 'host' for platform, of engine-reference \d"
    worker = started()
    assert worker._runner is not None
    for method in ("execute", "sample", "drafts"):
        monkeypatch.setattr(worker._runner, method, fail)
    with pytest.raises(ContractError, match=named):
        worker.execute(SimpleNamespace(sections=None))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=named):
        worker.sample(1, None)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=named):
        worker.drafts(1)
    monkeypatch.setattr(HostPlatformBody, "allocate_pool", fail)
    with pytest.raises(ContractError, match=named):
        ready()


# -- the worker ------------------------------------------------------------------------------------------------------
def worker_started(info: WorkerReady) -> None:
    HEARD.append(info)


def test_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.plugin import hookimpl

    plugin = SimpleNamespace(worker_started=hookimpl(worker_started))
    monkeypatch.setattr(harness, "hook_plugin", plugin, raising=False)
    hook = harness.Candidate("hooks.worker", "listener", 0, "harness", "1", "harness:hook_plugin")
    found = Registry.discover(extra=(harness.CHECKPOINT, hook))
    HEARD.clear()
    answer = TorchWorker(start_message(), found).start()
    assert [answer] == HEARD


def plan_of(request: Request) -> StepPlan:
    plans: list[StepPlan] = []

    class Recorder:
        def execute(self, plan: StepPlan) -> None:
            plans.append(plan)

    Driver(Recorder()).submit((request, len(request.prompt)))  # type: ignore[arg-type]
    return plans[0]


def test_not_started_and_shut_down() -> None:
    worker = TorchWorker(start_message(), registry())
    plan = plan_of(Request(prompt(3), params(), slot=0))
    with pytest.raises(EngineDeadError):
        worker.execute(plan)
    worker.start()
    assert worker.execute(plan).result().tokens.shape == (1,)
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(EngineDeadError):
        worker.execute(plan)


def test_bfloat16_and_float32() -> None:
    """Logits come to the sampler in float32; the same tokens but for rounding."""
    for dtype in ("float32", "bfloat16"):
        worker = started(dtype=dtype)
        request = Request(prompt(20), params(logprobs=1), slot=0)
        Driver(worker).alone(request, 8)
        every = torch.log_softmax(dense_logits(request.tokens)[19:-1], dim=1)
        chosen = [every[i, token] for i, token in enumerate(request.outputs)]
        got = [values[0] for values in request.logprobs]
        np.testing.assert_allclose(got, chosen, atol=1e-4 if dtype == "float32" else 0.2)


def test_an_error_of_the_launch_is_the_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = started()

    def forward(*_: Any) -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(worker._runner._model, "forward", forward)  # type: ignore[union-attr]
    future = worker.execute(plan_of(Request(prompt(3), params(), slot=0)))
    assert isinstance(future, FailedStep) and future.done()
    with pytest.raises(RuntimeError, match="fell off the bus"):
        future.result()


class SlowFetch:
    """A copy that is done after a while."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self.until

    def wait(self) -> tuple[torch.Tensor, ...]:
        time.sleep(max(0.0, self.until - time.monotonic()))
        return (torch.tensor([5, 6], dtype=torch.int32),)


def test_future_waits() -> None:
    plan = plan_of(Request(prompt(3), params(), slot=0))
    plan.slot_of_row = np.zeros(4, np.int32)

    def put(result: StepResult, arrays: list[np.ndarray]) -> None:
        result.tokens[[1, 3]] = arrays[0]

    future: StepFuture = RunningStep(plan, [(1, put)], SlowFetch(0.2))
    assert not future.done()
    with pytest.raises(TimeoutError, match="step 0"):
        future.result(timeout=0.01)
    assert future.result(timeout=5).tokens.tolist() == [-1, 5, -1, 6]
    assert future.done() and future.result() is future.result()
