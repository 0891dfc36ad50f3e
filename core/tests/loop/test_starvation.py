"""Nobody starves: every request ends within a number of steps that depends on those before it, never on those after.

The requests before one are those unfinished when it comes, and later ones that the policy puts before it: none with
`fcfs`; with `priority` and ageing those that come so soon after it that their level outweighs its wait. Later requests
come without end, in a cache for two or three, with both modes of preemption, long prompts in chunks, and drafts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import drafting
import pytest
from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from paged_worker import VOCAB
from schedules import Planned, Settings, examples

from engine.interfaces.context import CoreContext
from engine.loop.engine_core import EngineCore
from engine.types.params import SamplingParams
from engine_reference.policy_fcfs import FCFS
from engine_reference.policy_priority import Priority, PriorityOptions

AGING = 8.0
STEPS = 60
LEVELS = 3


def aged(context: CoreContext) -> Priority:
    return Priority(replace(context, options=PriorityOptions(aging_seconds=AGING)))


def ageless(context: CoreContext) -> Priority:
    return Priority(replace(context, options=PriorityOptions()))


@dataclass
class Life:
    """A request's time.

    Args:
        work: tokens, prompt and output.
        came, ended: steps; ahead: the work of those unfinished when it came.
    """

    planned: Planned
    work: int
    came: int
    ahead: int
    ended: int = -1


def stream(rng: random.Random, index: int, levels: int) -> Planned:
    shared = [i % VOCAB for i in range(8)]
    prompt = [*shared[: rng.choice([0, 8])], *(rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 9])))]
    return Planned(
        request_id=f"r{index}",
        prompt=tuple(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=rng.choice([5, 12, 24]), ignore_eos=True, seed=0),
        priority=rng.randrange(levels),
        host_tokens=rng.random() < 0.1,
    )


def live(core: EngineCore, rng: random.Random, rate: float, levels: int) -> list[Life]:
    """Requests come at this rate for so many steps; then run to the end."""
    lives: dict[str, Life] = {}
    step = 0
    while step < STEPS or core.has_work():
        assert step < 100 * STEPS, f"no end: {core.stats()}"
        while step < STEPS and rng.random() < rate:
            planned = replace(stream(rng, len(lives), levels), arrives=step)
            ahead = sum(life.work for life in lives.values() if life.ended < 0)
            assert planned.params.max_tokens is not None
            work = len(planned.prompt) + planned.params.max_tokens
            lives[planned.request_id] = Life(planned, work, step, ahead)
            core.add_request(planned.to_request())
        for output in core.step().outputs:
            if output.finish_reason is not None:
                assert output.finish_reason == "length", output
                lives[output.request_id].ended = step
        step += 1
    core.check_integrity()
    return list(lives.values())


def overtaking(life: Life, lives: list[Life]) -> tuple[int, float]:
    """(work of later requests that an ageing policy puts before this one, steps in which they come)."""
    head_start = life.planned.priority * AGING
    work = sum(
        other.work
        for other in lives
        if other.came >= life.came
        and other is not life
        and other.came + other.planned.priority * AGING <= life.came + head_start
    )
    return work, head_start


settings = st.builds(
    Settings,
    num_pages=st.integers(12, 16),
    max_num_seqs=st.integers(2, 5),
    max_num_batched_tokens=st.sampled_from([2, 9, 32]),
    max_model_len=st.just(48),
    in_flight=st.sampled_from([1, 2, 3]),
    enable_prefix_caching=st.booleans(),
    hold=st.booleans(),
    drafter=st.sampled_from(["", "", *drafting.KINDS]),
    num_drafts=st.just(3),
    long_prefill_token_threshold=st.sampled_from([0, 1, 4]),
    swap_pages=st.sampled_from([0, 5, 200]),
)


@pytest.mark.parametrize("policy", [FCFS, aged])
@given(
    settings=settings,
    layout=st.sampled_from(["full", "full and sliding", "full, and a draft layer of other heads"]),
    rate=st.sampled_from([0.1, 0.2, 0.3]),
    seed=st.integers(0, 2**32),
)
@hypothesis_settings(max_examples=examples(15), deadline=None)
def test_every_request_ends_soon(policy: type, settings: Settings, layout: str, rate: float, seed: int) -> None:
    wide = 2 * settings.num_pages if layout == "full and sliding" else settings.num_pages  # two tables share the pool
    settings = replace(settings, num_pages=wide)
    core, _ = make_core(LAYOUTS[layout], settings, policy=policy)
    lives = live(core, random.Random(seed), rate, 1 if policy is FCFS else LEVELS)
    for life in lives:
        work, late = (0, 0.0) if policy is FCFS else overtaking(life, lives)
        # One token of the one who goes first takes a step, and as many more as are under way when its pages are taken
        # from others; then comes the next.
        bound = late + (settings.in_flight + 1) * (life.ahead + work + life.work + 2)
        assert life.ended - life.came <= bound, (life, bound, core.stats())
    stats = core.stats()
    event(f"preemptions: {min(stats.num_preemptions, 3)}, swapped: {stats.num_swap_preemptions > 0}")


def test_without_ageing_the_least_urgent_waits_for_ever() -> None:
    """What the property would find: urgent requests without end, and one that is not."""
    chosen = Settings(
        num_pages=12, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=48, in_flight=2,
        enable_prefix_caching=False,
    )  # fmt: skip
    ended = {}
    for policy in (ageless, aged):
        core, _ = make_core(LAYOUTS["full"], chosen, policy=policy)
        patient = Planned(request_id="patient", prompt=(1, 2), params=SamplingParams(max_tokens=2, seed=0), priority=5)
        for step in range(200):
            if step % 2 == 0:
                params = SamplingParams(temperature=0.0, max_tokens=4, seed=0, ignore_eos=True)
                core.add_request(Planned(request_id=f"r{step}", prompt=(3,), params=params, arrives=step).to_request())
            if step == 1:
                core.add_request(replace(patient, arrives=1).to_request())
            if any(o.request_id == "patient" and o.finish_reason is not None for o in core.step().outputs):
                ended[policy] = step
    assert list(ended) == [aged] and ended[aged] < 150
