"""Logits that are not numbers end their request, and nothing of it stays in the prefix cache."""

from __future__ import annotations

import random
from dataclasses import replace

import drafting
import pytest
from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Outcome, Planned, Schedule, examples, run_schedule, schedules
from spoiling import POISON, CarelessWorker, SpoilingWorker

from engine.loop.engine_core import EngineCore
from engine.types.params import SamplingParams

PLAIN = sorted(name for name, layout in LAYOUTS.items() if "state" not in {g.kind for g in layout.groups})


def poisoned(schedule: Schedule, seed: int, calm: bool) -> Schedule:
    """The schedule with a poisonous token in the prompts of some requests, the same in those of siblings.

    calm: nobody is taken away.
    """
    places: dict[str, float | None] = {}
    rng, requests = random.Random(seed), []
    for request in schedule.requests:
        share = places.setdefault(request.parent or request.request_id, rng.choice([None, None, 0.99, rng.random()]))
        prompt = list(request.prompt)
        if share is not None:
            prompt[int(share * len(prompt))] = POISON
        request = replace(request, prompt=tuple(prompt))
        requests.append(replace(request, aborted=None, timeout=None) if calm else request)
    return replace(schedule, requests=tuple(requests))


def run_alone(core: EngineCore, schedule: Schedule, prompt: tuple[int, ...]) -> tuple[Planned, Outcome]:
    name = f"alone-{core.scheduler.last_step}"
    request = Planned(request_id=name, prompt=prompt, params=SamplingParams(temperature=0, max_tokens=2, seed=0))
    return request, run_schedule(core, replace(schedule, requests=(request,)))[name]


def is_broken(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error[0] == "invalid_logits"


@pytest.mark.parametrize("worker", [SpoilingWorker, CarelessWorker])
@given(
    schedule=schedules(VOCAB, drafters=("", "", *drafting.KINDS)),
    crowd=schedules(VOCAB, crowded=True),
    crowded=st.booleans(),
    calm=st.sampled_from([True, True, False]),
    layout=st.sampled_from(PLAIN),
    seed=st.integers(0, 2**32),
)
@hypothesis_settings(max_examples=examples(20), deadline=None)
def test_what_is_spoilt_is_not_found(
    worker: type[SpoilingWorker],
    schedule: Schedule,
    crowd: Schedule,
    crowded: bool,
    calm: bool,
    layout: str,
    seed: int,
) -> None:
    """In any schedule of chunks, drafts, preemptions, swaps, siblings and aborts, with any number of steps in flight.

    Where attention keeps its promise, nobody else notices. Where it does not, a request that is computed beside a
    poisonous one may be broken too; but afterwards nobody is who shares a prompt's beginning, unless a request was
    taken away before its logits told: then the first one who reads what it left is broken, and the next one is not.
    """
    schedule = poisoned(crowd if crowded else schedule, seed, calm)
    core, _ = make_core(LAYOUTS[layout], schedule.settings, worker=worker)
    outcomes = run_schedule(core, schedule)
    broken = [name for name, outcome in outcomes.items() if is_broken(outcome)]
    for request in schedule.requests:
        outcome = outcomes[request.request_id]
        if POISON in request.prompt or (is_broken(outcome) and not worker.keeps_promise):
            continue
        check_outcome(core, request, outcome)
    told = all(outcome.error is None or is_broken(outcome) for outcome in outcomes.values())
    told = told and all(outcome.finish_reason != "abort" for outcome in outcomes.values())
    beginnings = [prompt[: (*prompt, POISON).index(POISON)] for prompt in (r.prompt for r in schedule.requests)]
    for prompt in filter(None, beginnings * 2):  # what one of them computes may lead the next one on to what was left
        request, outcome = run_alone(core, schedule, prompt)
        if is_broken(outcome):
            assert not worker.keeps_promise and not told, "what a broken row left was found"
            request, outcome = run_alone(core, schedule, prompt)
        check_outcome(core, request, outcome)
    event(f"broken: {len(broken) > 0}, all told: {told}, hits: {core.stats().prefix_hits > 0}")
