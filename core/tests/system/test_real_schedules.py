"""The whole engine below the frontend, with the real runner in float64: any schedule of arrivals, aborts, chunks,
prefix hits, preemptions, steps in flight and drafts gives each request exactly the tokens that it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import drafters
import drafting
import msgspec
import pytest
import torch
from cores import canary, host, swapping
from harness import ALL_PROCESSORS, VOCAB, choice, layout, registry, start_message
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from masking import ScriptedGrammar, constrained, constraints_of, jump_forward
from paged_worker import HoldingExecutor
from schedules import Outcome, Planned, Schedule, Settings, run_schedule, schedules
from thread_ranks import ThreadExecutor

from engine.interfaces.context import CoreContext
from engine.kv.manager import KVManager
from engine.loop.engine_core import EngineCore
from engine.runner.attention import AttentionLayers
from engine.runner.buffers import StepBuffers, StepInputBuffers
from engine.runner.drafting import Drafting
from engine.runner.worker import TorchWorker
from engine.scheduling.scheduler import Scheduler
from engine.types.errors import EngineError
from engine.types.kv import KVLayout
from engine.types.outputs import StepStats
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine.types.plan import StepPlan
from engine.types.start import WorkerReady, WorkerStart
from engine_kit.speculation import Speculation
from engine_reference.evictor_lru import LRU
from engine_reference.policy_fcfs import FCFS

ROOMY = Settings(
    num_pages=200, max_num_seqs=1, max_num_batched_tokens=256, max_model_len=40, in_flight=1,
    enable_prefix_caching=False, hold=False,
)  # fmt: skip


class Crew(ThreadExecutor):
    """Ranks as threads, behind the interface of one worker."""

    def __init__(self, message: WorkerStart) -> None:
        self._message = message
        self._last = None
        self.overlaps = 0

    def make(self, start: WorkerStart) -> TorchWorker:
        return TorchWorker(start, registry(*drafters.CANDIDATES))

    def begun(self) -> WorkerReady:
        return self.start(self._message)

    def drafts(self, step_id: int) -> list[list[int]]:
        drafts: list[list[int]] = self.call("drafts", step_id)[-1]
        return drafts


def laid_out(drafter: str, parallel: Parallel | None = None, whole: bool = False) -> KVLayout:
    """On one rank of these, with the layers of the drafter's models; in blocks of about as many tokens."""
    drafts = drafters.draft_starts(drafter, parallel, whole)
    tp, cp = (1, 1) if parallel is None else (parallel.tp, parallel.cp)
    form = drafters.layout_with(drafts, tp, 8 // cp) if drafts else layout(tp, 8 // cp)
    return form.shared(cp)


def message_for(
    settings: Settings, buckets: bool, parallel: Parallel | None = None, whole: bool = False
) -> WorkerStart:
    """What a worker is started with; see `worker_for`."""
    found = registry(*drafters.CANDIDATES)
    form = laid_out(settings.drafter, parallel, whole)
    message = start_message(
        platform="buckets" if buckets else "host",
        attention="capturable" if buckets else "torch",
        processors=ALL_PROCESSORS,
        layout=form,
        drafts=drafters.draft_starts(settings.drafter),
        num_kv_pages=settings.num_pages,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        swap_space=settings.swap_pages * form.page_bytes,
    )
    if settings.drafter.endswith("tree"):
        message = msgspec.structs.replace(
            message, model=msgspec.structs.replace(message.model, attention_features=("tree",))
        )
    if parallel is not None:
        message = msgspec.structs.replace(
            message,
            parallel=parallel,
            drafts=drafters.draft_starts(settings.drafter, parallel, whole),
            choices=(*message.choices, choice(found, "communicator", "gloo")),
        )
    if settings.canary:
        message = msgspec.structs.replace(
            message, layout=message.layout.marked(), swap_space=settings.swap_pages * form.marked().page_bytes
        )
    if settings.swap_pages:
        message = msgspec.structs.replace(message, choices=(*message.choices, choice(found, "kv_connector", "host")))
    if settings.drafter:
        name, options = drafters.options(settings.drafter)
        drafter = choice(found, "drafter", name, options=options)
        message = msgspec.structs.replace(message, choices=(*message.choices, drafter))
    return message


@lru_cache(maxsize=32)
def worker_for(
    settings: Settings, buckets: bool = False, parallel: Parallel | None = None, whole: bool = False
) -> tuple[TorchWorker | Crew, WorkerReady]:
    """Workers keep nothing from one schedule to the next but stale pages, which no request may read.

    parallel: over several workers, as threads; whole: but draft models, of which each has the whole.
    """
    message = message_for(settings, buckets, parallel, whole)
    if parallel is not None:
        crew = Crew(message)
        return crew, crew.begun()
    worker = TorchWorker(message, registry(*drafters.CANDIDATES))
    return worker, worker.start()


def unvaried(settings: Settings) -> Settings:
    """What of the settings makes a worker what it is."""
    settings = replace(settings, in_flight=1, enable_prefix_caching=False, hold=False, num_drafts=0, adaptive=True)
    return replace(settings, long_prefill_token_threshold=0, jump_forward=False)


def make_core(
    settings: Settings, buckets: bool = False, parallel: Parallel | None = None, whole: bool = False
) -> tuple[EngineCore, HoldingExecutor]:
    """An engine core with the real worker behind an executor that holds results back."""
    worker, ready = worker_for(unvaried(settings), buckets, parallel, whole)
    form = laid_out(settings.drafter, parallel, whole)
    if settings.canary:
        form = form.marked()
    for one in worker.workers if isinstance(worker, Crew) else [worker]:
        chosen = next((part._chosen for part in one._runner._parts if isinstance(part, Drafting)), None)
        if chosen is not None and isinstance(chosen.drafter, drafters.KnowingBody):
            chosen.drafter.slots.clear()  # the last to leave are told of with the next plan, which another core makes
    return core_around(worker, ready, form, settings, 1 if parallel is None else parallel.pp)


def core_around(
    worker: Any, ready: WorkerReady, form: KVLayout, settings: Settings, stages: int = 1
) -> tuple[EngineCore, HoldingExecutor]:
    """An engine core with a worker that has been started, behind an executor that holds results back."""
    hold = max(1, settings.in_flight - 1) if settings.hold else 0
    executor = HoldingExecutor(worker, form, settings.max_num_seqs, settings.max_model_len, hold)
    context = CoreContext(
        layout=form,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        num_pages=settings.num_pages,
        swap_space=settings.swap_pages * form.page_bytes,
    )
    kv = KVManager(
        form,
        num_pages=settings.num_pages,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        evictor=LRU(context),
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    speculation = Speculation(settings.max_num_seqs, settings.num_drafts, settings.adaptive)
    connectors = [*canary(context), *host(context)]
    scheduler = Scheduler(
        kv=kv,
        policy=FCFS(context),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        speculation=speculation if settings.drafter else None,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        swapping=swapping(kv, connectors, FCFS(context)),
        connectors=connectors,
        constraints=constraints_of(ScriptedGrammar(VOCAB, VOCAB - 2), VOCAB),
        jump_forward=jump_forward(settings.max_num_seqs, VOCAB) if settings.jump_forward else None,
        stages=stages,
    )
    core = EngineCore(scheduler=scheduler, executor=executor, worker_ready=ready, in_flight=settings.in_flight)
    return core, executor


ALONE: dict[str, Outcome] = {}
"""What requests get alone: several tests ask for the same ones, some of them twice."""


def alone(request: Planned) -> Outcome:
    """The request by itself: no neighbours, no reuse, one step at a time."""
    single = replace(request, request_id="alone", arrives=0, aborted=None, parent=None, timeout=None)
    if (key := repr(single)) not in ALONE:
        core, _ = make_core(ROOMY)
        ALONE[key] = run_schedule(core, Schedule(settings=ROOMY, requests=(single,)))["alone"]
    return ALONE[key]


def with_sampling(schedule: Schedule, seed: int) -> Schedule:
    """The same schedule, with every sampling feature on some of its requests."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    def params(old: SamplingParams) -> SamplingParams:
        extra = rng.choice([None, None, {"neighbours": 1.5}, {"window": 4}, {"window": 2, "neighbours": -3.0}])
        if rng.random() < 0.35:
            old = constrained(old, str(rng.random()))
        return msgspec.structs.replace(
            old,
            temperature=rng.choice([0.0, 0.7, 1.5]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            seed=rng.getrandbits(63),
            logit_bias=rng.choice([None, None, {token: rng.uniform(-9, 9) for token in ids(1, 5)}]),
            # Words of one to three tokens over a small alphabet, so that they come up.
            bad_words_token_ids=rng.choice([[], [], [ids(1, 3) for _ in range(rng.randint(1, 80))]]),
            allowed_token_ids=rng.choice([None, None, None, list(range(0, VOCAB, 3))]),
            prompt_logprobs=rng.choice([None, None, 0, 3]),
            extra_args=extra,
        )

    requests = [replace(r, params=params(r.params)) for r in schedule.requests]
    return replace(
        schedule, requests=tuple(replace(r, host_tokens="window" in (r.params.extra_args or {})) for r in requests)
    )


def check(request: Planned, got: Outcome) -> None:
    """`got` is what the request gets alone, as far as it came."""
    expected = alone(request)
    if got.finish_reason in ("abort", "error"):
        assert got.tokens == expected.tokens[: len(got.tokens)]
        if got.error is not None and got.error[0] == EngineError.code:  # its constraint left nothing to draw
            assert (got.error, got.tokens) == (expected.error, expected.tokens)
    else:
        assert (got.tokens, got.finish_reason, got.stop_reason) == (
            expected.tokens,
            expected.finish_reason,
            expected.stop_reason,
        )
    if got.finish_reason not in ("abort", "error"):
        scored = 0 if request.params.prompt_logprobs is None else len(request.prompt) - 1
        assert len(got.prompt_logprobs) == len(expected.prompt_logprobs) == scored
    pairs = (
        *zip(got.logprobs, expected.logprobs, strict=False),
        *zip(got.prompt_logprobs, expected.prompt_logprobs, strict=False),
    )
    for mine, theirs in pairs:
        assert (mine.rank, mine.top_ids) == (theirs.rank, theirs.top_ids)
        assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-5)  # they travel in float32


@given(schedule=schedules(VOCAB, max_requests=6), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_the_tokens_that_it_gets_alone(schedule: Schedule, seed: int) -> None:
    schedule = with_sampling(schedule, seed)
    core, executor = make_core(schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check(request, outcomes[request.request_id])
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}")
    event(f"swapped: {min(core.stats().num_swap_preemptions, 3)}")
    event(f"placeholders: {executor.num_placeholders > 0}")
    event(f"sampled after the step before came back: {executor.num_ahead > 0}")


@pytest.mark.slow
@given(schedule=schedules(VOCAB), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(schedule: Schedule, seed: int) -> None:
    schedule = with_sampling(schedule, seed)
    core, _ = make_core(schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check(request, outcomes[request.request_id])


@given(schedule=schedules(VOCAB, max_requests=5, crowded=True), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_preempted_requests_get_the_tokens_that_they_get_alone(schedule: Schedule, seed: int) -> None:
    schedule = with_sampling(schedule, seed)
    core, executor = make_core(schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check(request, outcomes[request.request_id])
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}")
    event(f"swapped: {min(core.stats().num_swap_preemptions, 3)}")
    event(f"placeholders: {executor.num_placeholders > 0}")


@pytest.mark.slow
@given(schedule=schedules(VOCAB, drafters=("", "ngram"), crowded=True), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_crowded_schedules(schedule: Schedule, seed: int) -> None:
    run_with_drafts(schedule, seed)


DRAFTERS = ("ngram", "layer", "model", "tree", *drafting.KINDS)
QUICK_DRAFTERS = ("ngram", "model", "tree", "mixed")
"""The others are left to `make test-all`: "mixed" goes every scripted drafter's way, "model" that of "layer"."""


def run_with_drafts(schedule: Schedule, seed: int) -> StepStats:
    schedule = with_sampling(schedule, seed)
    truths = [[*request.prompt, *alone(request).tokens] for request in schedule.requests]
    core, executor = make_core(schedule.settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters.KnowingBody, "truths", truths)
        patch.setattr(drafters.KnowingBody, "exact", True)
        outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check(request, outcomes[request.request_id])
    event(f"placeholders: {executor.num_placeholders > 0}")
    return core.stats()


@given(schedule=schedules(VOCAB, max_requests=6, drafters=DRAFTERS), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_drafts_change_no_token(schedule: Schedule, seed: int) -> None:
    stats = run_with_drafts(schedule, seed)
    event(f"{schedule.settings.drafter}: accepted {stats.num_accepted_drafts > 0}")
    event(f"preemptions: {min(stats.num_preemptions, 3)}")


@pytest.mark.slow
@given(schedule=schedules(VOCAB, drafters=DRAFTERS), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules_with_drafts(schedule: Schedule, seed: int) -> None:
    run_with_drafts(schedule, seed)


def _pads(buffers: StepBuffers, frame: StepInputBuffers, plan: StepPlan, *_: object) -> bool:
    return frame.tokens_per_row > 1 and bool((plan.num_tokens < frame.tokens_per_row).any())


@pytest.mark.parametrize(
    ("in_flight", "buckets", "drafter"),
    [
        pytest.param(in_flight, buckets, drafter, marks=pytest.mark.slow if slow else ())
        for in_flight, buckets in ((1, False), (2, False), (2, True))
        for drafter in DRAFTERS
        for slow in [drafter not in (("mixed",) if in_flight == 1 or buckets else QUICK_DRAFTERS)]
    ],
)
def test_drafts_with_every_sampling_feature_in_a_crowded_cache(in_flight: int, buckets: bool, drafter: str) -> None:
    """Penalties and min_tokens depend on the drafts before; siblings, preemption and prefix hits happen too."""
    settings = Settings(
        num_pages=18, max_num_seqs=5, max_num_batched_tokens=33, max_model_len=48, in_flight=in_flight,
        enable_prefix_caching=True, drafter=drafter, num_drafts=4, adaptive=drafter == "ngram",
    )  # fmt: skip
    rng = random.Random(5)
    shared = [rng.randrange(1, 5) for _ in range(8)]
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=(*shared[: 8 * (i % 2)], *(rng.randrange(1, 5) for _ in range(3 + i))),
            params=SamplingParams(
                temperature=(i % 3) * 0.6, top_k=(0, 4)[i % 2], top_p=(1.0, 0.9)[i % 4 == 3],
                repetition_penalty=(1.0, 1.6)[i % 2], presence_penalty=0.4 * (i % 2), frequency_penalty=0.1 * (i % 3),
                max_tokens=27, min_tokens=20, stop_token_ids=list(range(VOCAB // 2)), seed=i, logprobs=i % 2,
            ),
            arrives=i // 5,
        )
        for i in range(9)
    )  # fmt: skip
    core, executor = make_core(settings, buckets)
    truths = [[*request.prompt, *alone(request).tokens] for request in requests]
    padded: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters.KnowingBody, "truths", truths)
        patch.setattr(drafters.KnowingBody, "exact", True)
        fill = StepBuffers.fill
        patch.setattr(StepBuffers, "fill", lambda *args, **named: padded.append(_pads(*args)) or fill(*args, **named))
        outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    worker: Any = executor.worker
    captures = worker._runner._platform.captures if buckets else {}
    assert not buckets or sum(captures[key] for key in captures if key is not None and key.tokens_per_row > 1) >= 5
    assert any(padded) == buckets or drafter in ("ngram", "layer", "model"), (
        "rows with fewer drafts than others are padded"
    )
    for request in requests:
        outcome = outcomes[request.request_id]
        assert len(outcome.tokens) >= 20
        assert len(outcome.logprobs) == len(outcome.tokens)
        check(request, outcome)
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_drafts >= 5, stats
    if drafter == "right":
        assert stats.num_accepted_drafts > 0.8 * stats.num_drafts  # not all: behind a request's end nothing is right
    elif drafter == "wrong":
        assert stats.num_accepted_drafts == 0


@pytest.mark.parametrize(
    ("parallel", "whole", "swap_pages", "buckets"),
    [
        pytest.param(None, False, 0, False, marks=pytest.mark.slow),
        (None, False, 100, True),
        pytest.param(Parallel(tp=2), False, 0, False, marks=pytest.mark.slow),
        (Parallel(tp=2), True, 0, False),
        (Parallel(pp=2), False, 100, False),
    ],
    ids=["one rank", "swapped and captured", "divided", "whole", "staged"],
)
def test_a_draft_model_that_is_the_target_itself_is_always_right(
    parallel: Parallel | None, whole: bool, swap_pages: int, buckets: bool
) -> None:
    """Sampled too: a draft is drawn with the number that the target will draw with. It has to have every key and value
    that the target has, over chunks, preemption, swapping and prefix hits."""
    settings = Settings(
        num_pages=26, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40, in_flight=2,
        enable_prefix_caching=True, drafter="copy", num_drafts=4, adaptive=False, swap_pages=swap_pages,
    )  # fmt: skip
    rng = random.Random(5)
    shared = [rng.randrange(1, VOCAB) for _ in range(8)]
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=(*shared[: 8 * (i % 2)], *(rng.randrange(1, VOCAB) for _ in range(3 + i))),
            params=SamplingParams(
                temperature=(i % 3) * 0.6, top_k=(0, 4)[i % 2], top_p=(1.0, 0.9)[i % 4 == 3],
                max_tokens=21, seed=i, ignore_eos=True,
            ),
            arrives=i // 3,
        )
        for i in range(9)
    )  # fmt: skip
    core, executor = make_core(settings, buckets, parallel, whole)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        check(request, outcomes[request.request_id])
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_drafts > 50, stats
    assert stats.num_accepted_drafts == stats.num_drafts, stats
    if buckets:
        worker: Any = executor.worker
        captures = worker._runner._platform.captures
        assert sum(count for key, count in captures.items() if key is not None and key.of == "draft0") > 50


@pytest.mark.parametrize("buckets", [False, True])
def test_paths_through_trees(buckets: bool) -> None:
    """Of drafts that branch the path that was drawn is kept, with its keys and values; the next step begins behind it.
    Rows with penalties get chains beside them, with captured steps and without."""
    settings = Settings(
        num_pages=26, max_num_seqs=5, max_num_batched_tokens=48, max_model_len=48, in_flight=2,
        enable_prefix_caching=True, drafter="tree", num_drafts=7, adaptive=False,
    )  # fmt: skip
    rng = random.Random(5)
    shared = [rng.randrange(1, VOCAB) for _ in range(8)]
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=(*shared[: 8 * (i % 2)], *(rng.randrange(1, VOCAB) for _ in range(3 + i))),
            params=SamplingParams(
                temperature=(i % 3) * 0.6, top_p=(1.0, 0.9)[i % 4 == 3], presence_penalty=0.4 * (i % 4 == 2),
                max_tokens=27, min_tokens=9, seed=i, stop_token_ids=list(range(VOCAB // 4)), logprobs=i % 2,
            ),
            arrives=i // 3,
        )
        for i in range(9)
    )  # fmt: skip
    truths = [[*request.prompt, *alone(request).tokens] for request in requests]
    core, _ = make_core(settings, buckets)
    moves: list[int] = []
    move = AttentionLayers.move

    def noted(layers: AttentionLayers, batches: Any, source: torch.Tensor, destination: torch.Tensor) -> None:
        moves.append(int((source != destination).sum()))
        move(layers, batches, source, destination)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters.KnowingBody, "truths", truths)
        patch.setattr(drafters.KnowingBody, "exact", True)
        patch.setattr(AttentionLayers, "move", noted)
        outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        check(request, outcomes[request.request_id])
    stats = core.stats()
    assert stats.prefix_hits > 0 and stats.num_accepted_drafts > 20, stats
    assert sum(moves) > 20, "no path left the places of its nodes"


@pytest.mark.parametrize("swap_pages", [0, 100])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_crowded_cache_with_steps_in_flight(in_flight: int, swap_pages: int) -> None:
    """Placeholders, preemptions (swapped or not) and prefix hits all happen here, and change nothing."""
    settings = Settings(
        num_pages=22, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40, in_flight=in_flight,
        enable_prefix_caching=True, swap_pages=swap_pages,
    )  # fmt: skip
    rng = random.Random(3)
    shared = [rng.randrange(1, VOCAB) for _ in range(16)]
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=(*shared[: 16 * (i % 2)], *(rng.randrange(1, VOCAB) for _ in range(1 + 2 * i))),
            params=SamplingParams(temperature=(i % 3) * 0.6, max_tokens=17, seed=i, ignore_eos=True, logprobs=i % 2),
            arrives=i,
        )
        for i in range(9)
    )
    core, executor = make_core(settings)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        assert outcomes[request.request_id].finish_reason == "length"
        check(request, outcomes[request.request_id])
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0
    assert stats.num_swap_preemptions == (stats.num_preemptions if swap_pages else 0)
    assert (executor.num_placeholders > 0) == (in_flight == 2)
    assert executor.most_in_flight == in_flight


@pytest.mark.parametrize(("in_flight", "buckets"), [(1, False), (2, False), (2, True)])
def test_constrained_rows_in_a_crowded_cache(in_flight: int, buckets: bool) -> None:
    """Every second request is constrained; preemptions and prefix hits happen too."""
    settings = Settings(
        num_pages=17, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40, in_flight=in_flight,
        enable_prefix_caching=True,
    )  # fmt: skip
    rng = random.Random(3)
    shared = [rng.randrange(1, VOCAB) for _ in range(16)]
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=(*shared[: 16 * (i % 3)], *(rng.randrange(1, VOCAB) for _ in range(1 + 2 * i)))[:22],
            params=constrained(
                SamplingParams(temperature=(i % 3) * 0.6, max_tokens=17, seed=i, ignore_eos=True, logprobs=i % 2),
                f"seed {i}" if i % 2 else "",
            ),
            arrives=i // 4,
        )
        for i in range(9)
    )  # fmt: skip
    requests = tuple(
        r if r.params.structured_outputs is not None and r.params.structured_outputs.regex
        else replace(r, params=msgspec.structs.replace(r.params, structured_outputs=None))
        for r in requests
    )  # fmt: skip
    core, executor = make_core(settings, buckets)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        check(request, outcomes[request.request_id])
    assert core.stats().num_preemptions > 0 and core.stats().prefix_hits > 0
    assert (executor.num_ahead > 2) == (in_flight == 2)
