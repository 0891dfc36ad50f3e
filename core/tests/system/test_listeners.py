"""Listeners of the walk under any schedule: streams that are recorded are those of a plain forward pass, and tokens
that are left out where nobody needs them change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import drafters
import msgspec
import numpy as np
import pytest
import test_real_schedules
import torch
from harness import VOCAB, WINDOW, dense_logits, with_part
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Planned, Schedule, Settings, run_schedule, schedules
from test_real_schedules import alone, check, make_core, with_sampling, worker_for

from engine.interfaces.step import LayerListener, StepPart, StepView, TargetStep
from engine.runner.walk import StreamRecorder
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine.types.plan import NewSlot, StepPlan
from engine_reference.ops_torch.ops import TorchOpsBody

LAYERS = (0, 1, 2)


class Recording(StepPart):
    """Keeps each token's streams, by request, position and layer."""

    def __init__(self) -> None:
        self.requests: dict[int, str] = {}
        self.seen: dict[tuple[str, int, int], torch.Tensor] = {}

    def enter(self, new: NewSlot) -> None:
        self.requests[new.slot] = new.request_id

    def listeners(self) -> tuple[LayerListener, ...]:
        return (StreamRecorder(TorchOpsBody(None), LAYERS),)  # type: ignore[arg-type]

    def launched(self, step: TargetStep) -> None:
        plan, starts = step.plan, step.query_start_loc.tolist()
        kept = step.kept.tolist()
        rows = zip(plan.slot_of_row.tolist(), plan.num_computed.tolist(), strict=True)
        for row, (slot, first) in enumerate(rows):
            for layer, stream in step.streams.items():
                for token in range(kept[row] if step.hidden is not None else int(plan.num_tokens[row])):
                    self.seen[self.requests[slot], first + token, layer] = stream[starts[row] + token].clone()


class Selecting(StepPart, LayerListener):
    """The last layer sees WINDOW keys: before it, of each row the last WINDOW tokens are selected, and its drafts."""

    layers = frozenset({2})

    def __init__(self) -> None:
        self.left_out = 0

    def listeners(self) -> tuple[LayerListener, ...]:
        return (self,)

    def hears(self, plan: StepPlan) -> bool:
        return bool((plan.num_tokens > WINDOW).any())

    def before(self, layer: int, view: StepView) -> None:
        plan = view.plan
        ends, drafts = plan.num_tokens.cumsum(), 0 if plan.num_drafts is None else plan.num_drafts
        rows = zip(ends.tolist(), np.minimum(plan.num_tokens, WINDOW + drafts).tolist(), strict=True)
        tokens = [token for end, count in rows for token in range(end - count, end)]
        view.select(torch.tensor(tokens))
        self.left_out += int(ends[-1]) - len(tokens)


def run(schedule: Schedule, part: StepPart, buckets: bool = False, parallel: Parallel | None = None) -> Any:
    """With workers of its own, which have this part."""

    def worker(*args: Any) -> Any:
        made = worker_for.__wrapped__(*args)
        if isinstance(part, Selecting):
            made[0].shutdown()
            message = msgspec.structs.replace(made[0]._start, model=seeing_places(made[0]._start.model))
            made = (fresh := type(made[0])(message, made[0]._registry)), fresh.start()
        return made

    with pytest.MonkeyPatch.context() as patch:
        with_part(part, patch)
        patch.setattr(test_real_schedules, "worker_for", worker)
        core, executor = make_core(schedule.settings, buckets, parallel)
    outcomes = run_schedule(core, schedule)
    executor.worker.shutdown()
    return outcomes, core


def seeing_places(model: Any) -> Any:
    return msgspec.structs.replace(model, attention_features=(*model.attention_features, "kv_index"))


@pytest.mark.parametrize(
    ("buckets", "parallel", "drafters"),
    [(False, None, ("",)), (True, None, ("mixed",)), (False, Parallel(pp=2), ("",))],
    ids=["plain", "captured drafts", "stages"],
)
@given(st.data())
@hypothesis_settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_streams_are_those_of_a_forward_pass(
    buckets: bool, parallel: Parallel | None, drafters: tuple[str, ...], data: st.DataObject
) -> None:
    crowded = data.draw(st.booleans())
    schedule = data.draw(schedules(VOCAB, max_requests=5, crowded=crowded, drafters=drafters))
    schedule = with_sampling(schedule, data.draw(st.integers(0, 2**32)))
    if parallel is not None:
        schedule = replace(schedule, settings=replace(schedule.settings, in_flight=parallel.pp + 1))
    part = Recording()
    outcomes, core = run(schedule, part, buckets, parallel)
    for request in schedule.requests:
        tokens = [*request.prompt, *outcomes[request.request_id].tokens]
        streams: list[torch.Tensor] = []
        dense_logits(tokens, streams=streams)
        for (of, position, layer), found in part.seen.items():
            if of == request.request_id and position < len(tokens):
                torch.testing.assert_close(found, streams[layer][position], rtol=1e-9, atol=1e-9)
    event(f"recorded: {len(part.seen) > 50}")
    event(f"preemptions: {min(core.stats().num_preemptions, 2)}")
    event(f"prefix hits: {core.stats().prefix_hits > 0}")


@given(schedule=schedules(VOCAB, max_requests=5), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_tokens_that_nobody_needs_can_be_left_out(schedule: Schedule, seed: int) -> None:
    """Without prefix caching, whose hits may end where keys were not written, and without scores of prompts."""
    schedule = with_sampling(schedule, seed)
    requests = tuple(
        replace(r, params=msgspec.structs.replace(r.params, prompt_logprobs=None)) for r in schedule.requests
    )
    schedule = replace(schedule, requests=requests, settings=replace(schedule.settings, enable_prefix_caching=False))
    part = Selecting()
    outcomes, core = run(schedule, part)
    for request in schedule.requests:
        check(request, outcomes[request.request_id])
    event(f"left out: {part.left_out > 0}")
    event(f"preemptions: {min(core.stats().num_preemptions, 2)}")


def test_tokens_are_left_out_beside_drafts_that_branch() -> None:
    """What the nodes of a tree do not see stays hidden where a prompt of the same step is narrowed."""
    settings = Settings(
        num_pages=99, max_num_seqs=5, max_num_batched_tokens=64, max_model_len=32, in_flight=1,
        enable_prefix_caching=False, drafter="tree", num_drafts=7, adaptive=False,
    )  # fmt: skip
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=tuple(range(1 + i, 10 + 2 * i)),
            params=SamplingParams(temperature=0.0, max_tokens=12, seed=i, ignore_eos=True, logprobs=2),
            arrives=2 * i,
        )
        for i in range(4)
    )
    truths = [[*request.prompt, *alone(request).tokens] for request in requests]
    part = Selecting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters.KnowingBody, "truths", truths)
        outcomes, core = run(Schedule(settings=settings, requests=requests), part)
    assert part.left_out > 0 and core.stats().num_accepted_drafts > 0
    for request in requests:
        check(request, outcomes[request.request_id])
