"""Constrained requests beside others: masks that follow their step, compilation beside the loop, and every end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import drafting
import pytest
from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from masking import BROKEN, ScriptedGrammar, ScriptedMatcher, constrained, with_masks
from outcomes import check_outcome
from paged_worker import VOCAB, HoldingExecutor, alone, make_grammar
from schedules import Outcome, Planned, Schedule, Settings, examples, run_schedule, schedules

from engine.loop.engine_core import EngineCore
from engine.types.errors import InvalidRequestError
from engine.types.params import SamplingParams
from engine.types.plan import Masks, StepPlan
from engine.types.structured_outputs import StructuredOutputsParams

PLAIN = Settings(
    num_pages=100, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, in_flight=2, enable_prefix_caching=True
)


def planned(request_id: str, seed: str = "", max_tokens: int = 12, **changes: Any) -> Planned:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    if seed:
        params = constrained(params, seed)
    return Planned(request_id=request_id, prompt=(1, 2, 3), params=params, **changes)


def finish(core: EngineCore, outcomes: dict[str, Outcome] | None = None) -> dict[str, Outcome]:
    outcomes = {} if outcomes is None else outcomes
    deadline = time.monotonic() + 30
    while core.has_work():
        assert time.monotonic() < deadline, "it hangs"
        for output in core.step().outputs:
            outcomes.setdefault(output.request_id, Outcome()).take(output)
        core.check_integrity()
    return outcomes


def finish_dead(core: EngineCore) -> dict[str, Outcome]:
    """As `finish`, of a core that dies on the way."""
    outcomes: dict[str, Outcome] = {}
    while core.has_work():
        for output in core.step().outputs:
            outcomes.setdefault(output.request_id, Outcome()).take(output)
    return outcomes


def expect(core: EngineCore, request: Planned, outcomes: dict[str, Outcome]) -> None:
    check_outcome(core, request, outcomes[request.request_id])


# -- any schedule ------------------------------------------------------------------------------------------------------
@given(
    schedule=schedules(VOCAB, drafters=("", "", *drafting.KINDS)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 2**32),
)
@hypothesis_settings(max_examples=examples(30), deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(schedule: Schedule, layout: str, seed: int) -> None:
    schedule = with_masks(schedule, seed)
    core, executor = make_core(LAYOUTS[layout], schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}")
    event(f"sampled after the step before came back: {executor.num_ahead > 0}")
    event(f"jumped: {executor.worker.num_given > 0}, accepted: {core.stats().num_accepted_jump_tokens > 0}")
    event(f"completed: {any(outcome.completed for outcome in outcomes.values())}")


@pytest.mark.parametrize(("in_flight", "hold"), [(1, True), (2, True), (3, True), (2, False)])
def test_the_forward_pass_runs_ahead_of_the_masks(in_flight: int, hold: bool) -> None:
    core, executor = make_core(LAYOUTS["full and sliding"], replace(PLAIN, in_flight=in_flight, hold=hold))
    requests = tuple(planned(f"r{i}", f"{i}" if i % 2 else "", 20) for i in range(6))
    outcomes = run_schedule(core, Schedule(settings=PLAIN, requests=requests))
    for request in requests:
        expect(core, request, outcomes)
    # A step waits for its masks before the next is planned, so a third is never under way.
    assert executor.most_in_flight == (min(in_flight, 2) if hold else 1)
    assert (executor.num_ahead > 10) == (in_flight > 1 and hold)


def test_one_mask_for_each_token() -> None:
    """None for rows without a constraint, and none twice."""
    grammar = make_grammar()
    core, _ = make_core(LAYOUTS["full"], PLAIN, grammar=grammar)
    requests = [planned("a", "1"), planned("free"), planned("b", "2")]
    for request in requests:
        core.add_request(request.to_request())
    outcomes = finish(core)
    wanted = sum(len(outcomes[name].tokens) for name in ("a", "b"))
    # A step that was planned when a request reached its end is masked no more, one planned before is.
    assert wanted <= grammar.num_masks <= wanted + 2


def test_steps_without_constrained_rows_have_no_masks() -> None:
    core, executor = make_core(LAYOUTS["full"], PLAIN)
    plans: list[StepPlan] = []
    execute = executor.execute

    def recorded(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    executor.execute = recorded  # type: ignore[method-assign]
    core.add_request(planned("a", "1", max_tokens=3).to_request())
    finish(core)
    core.add_request(planned("free").to_request())
    finish(core)
    follow = [plan.masks_follow for plan in plans]
    assert follow == sorted(follow, reverse=True) and not follow[-1] and follow[0]


def test_preemption_keeps_the_matcher() -> None:
    settings = replace(PLAIN, num_pages=16, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40)
    core, _ = make_core(LAYOUTS["full"], settings)
    requests = tuple(planned(f"r{i}", f"s{i}" if i != 2 else "", 30, arrives=i) for i in range(6))
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    assert core.stats().num_preemptions > 2
    for request in requests:
        expect(core, request, outcomes)


# -- drafts ------------------------------------------------------------------------------------------------------------
DRAFTED = replace(PLAIN, drafter="right", num_drafts=4, max_model_len=120)


def run_drafted(settings: Settings, *requests: Planned) -> tuple[EngineCore, HoldingExecutor, dict[str, Outcome]]:
    core, executor = make_core(LAYOUTS["full and sliding"], settings)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        expect(core, request, outcomes)
    return core, executor, outcomes


def without_end(length: int, start_at: int | None = None) -> Planned:
    """A constrained request whose script has no end before so many tokens.

    start_at: the constraint begins at about this place of the output.
    """
    free, _ = alone(LAYOUTS["full and sliding"], [1, 2, 3], planned("", max_tokens=length).params, [], 120)
    start = None
    if start_at is not None:
        start = [next(token for i, token in enumerate(free) if i >= start_at and token not in free[:i])]
    for seed in range(200):
        params = constrained(planned("", max_tokens=length).params, f"{seed}", start)
        if alone(LAYOUTS["full and sliding"], [1, 2, 3], params, [], 120)[1] == "length":
            return replace(planned("long"), params=params)
    raise AssertionError("every script ends")


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("start_at", [None, 3, 4, 7])
def test_right_drafts_under_masks_give_five_tokens_a_step(in_flight: int, start_at: int | None) -> None:
    """Where the constraint begins within the drafts, too."""
    request = without_end(21, start_at)
    core, executor, _ = run_drafted(replace(DRAFTED, in_flight=in_flight), request)
    assert executor.worker.num_steps == 1 + 4  # the prompt, which gives one token; 20 others by fives
    assert core.stats().num_accepted_drafts == core.stats().num_drafts == 16


def test_a_constraint_that_completes_within_the_drafts_ends_the_request_there() -> None:
    found = Counter()
    for seed in range(40):
        _, _, outcomes = run_drafted(DRAFTED, planned("a", f"{seed}"))
        found[outcomes["a"].completed] += 1
    assert found[True] > 5 and found[False] > 2


def test_a_driver_that_cannot_roll_back_gets_no_drafts() -> None:
    request = without_end(21)
    core, executor, _ = run_drafted(replace(DRAFTED, drafts_under_masks=False), request, planned("free"))
    drafts = core.stats().num_drafts
    assert executor.worker.num_steps >= 21 and 0 < drafts < 12, "those of the free request"


def test_drafts_are_asked_for_only_where_masks_depend_on_them() -> None:
    asked = []

    def counting(core: EngineCore, executor: HoldingExecutor) -> None:
        call = executor.call

        def counted(method: str, *args: object, rank: int | None = None) -> list[object]:
            assert rank == 0, "one answer is used, and one rank is asked"
            asked.append(method)
            return call(method, *args, rank=rank)

        executor.call = counted  # type: ignore[method-assign]

    core, executor = make_core(LAYOUTS["full"], replace(DRAFTED, drafts_under_masks=False))
    counting(core, executor)
    requests = (planned("free"), planned("a", "1"))
    outcomes = run_schedule(core, Schedule(settings=DRAFTED, requests=requests))
    assert core.stats().num_drafts and not asked
    core, executor = make_core(LAYOUTS["full"], DRAFTED)
    counting(core, executor)
    outcomes = run_schedule(core, Schedule(settings=DRAFTED, requests=requests))
    assert set(asked) == {"drafts"}
    for request in requests:
        expect(core, request, outcomes)


@pytest.mark.parametrize("told", [[], [[1, 2, 3, 4, 5]], [[VOCAB]], [[-1]], [["1"]], [[1], [2]], None])
def test_drafts_that_do_not_fit_the_plan_are_the_workers_fault(told: object) -> None:
    core, executor = make_core(LAYOUTS["full"], DRAFTED)
    executor.worker.drafts = lambda step_id: told
    core.add_request(without_end(20).to_request())
    outcomes = finish_dead(core)
    assert outcomes["long"].error is not None and "ContractError" in outcomes["long"].error[2]


def test_a_matcher_that_gives_up_on_a_draft_ends_its_request_alone() -> None:
    class Weak(ScriptedMatcher):
        def accept(self, tokens: Sequence[int]) -> int:
            if len(self.tokens) == 9:
                raise InvalidRequestError("go on", "it is too hard")
            return super().accept(tokens)

    class WeakGrammar(ScriptedGrammar):
        def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> ScriptedMatcher:
            made = super().compile(constraint, end_token_ids)
            return Weak(made._seed, VOCAB, 11) if constraint.regex == weak else made

    request, strong = without_end(21), planned("b", "strong")
    assert request.params.structured_outputs is not None
    weak = request.params.structured_outputs.regex
    core, _ = make_core(LAYOUTS["full and sliding"], DRAFTED, grammar=WeakGrammar(VOCAB, 11))
    core.add_request(request.to_request())
    core.add_request(strong.to_request())
    outcomes = finish(core)
    assert outcomes["long"].error == ("invalid_request", "go on", "it is too hard", "")
    truth, _ = alone(core.scheduler.kv.layout, [1, 2, 3], request.params, [], 120)
    assert outcomes["long"].tokens == truth[: len(outcomes["long"].tokens)] and len(outcomes["long"].tokens) < 10
    expect(core, strong, outcomes)


# -- jumping ahead -----------------------------------------------------------------------------------------------------
JUMPING = replace(PLAIN, jump_forward=True, max_model_len=120)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("drafter", ["", "right", "wrong"])
def test_jumps_take_fewer_steps_for_the_same_tokens(in_flight: int, drafter: str) -> None:
    """With a drafter, too; and its figures are its own."""
    settings = replace(JUMPING, in_flight=in_flight, drafter=drafter, num_drafts=2)
    total, steps, jumps = 0, 0, 0
    for seed in range(12):
        core, executor, outcomes = run_drafted(settings, planned("a", f"jump {seed}", 30))
        total, steps = total + len(outcomes["a"].tokens), steps + executor.worker.num_steps
        stats = core.stats()
        jumps += stats.num_accepted_jump_tokens
        assert stats.num_accepted_jump_tokens <= stats.num_jump_tokens
        assert (drafter == "right") >= (stats.num_accepted_drafts > 0) and (drafter != "") >= (stats.num_drafts > 0)
    assert jumps > 10 and steps < total - 10


def test_nobody_jumps_who_may_not() -> None:
    """Without a constraint, with a driver that cannot tell, or where it is turned off."""
    for settings in (replace(JUMPING, drafts_under_masks=False), replace(JUMPING, jump_forward=False)):
        _, executor, _ = run_drafted(settings, planned("a", "jump 1"), planned("free"))
        assert executor.worker.num_given == 0
    _, executor, _ = run_drafted(JUMPING, planned("free"))
    assert executor.worker.num_given == 0
    waits = replace(planned("a", "jump 1"), host_tokens=True)
    _, executor, _ = run_drafted(JUMPING, waits)
    assert executor.worker.num_given == 0, "somebody reads its tokens on the host"


# -- compilation -------------------------------------------------------------------------------------------------------
def test_others_run_while_a_constraint_is_compiled() -> None:
    go = threading.Event()
    grammar = make_grammar(lambda seed: go.wait(30) if seed == "slow" else None)
    core, _ = make_core(LAYOUTS["full"], PLAIN, grammar=grammar)
    requests = {r.request_id: r for r in (planned("slow", "slow"), planned("free"), planned("quick", "quick"))}
    for request in requests.values():
        core.add_request(request.to_request())
    outcomes: dict[str, Outcome] = {}
    while not {"free", "quick"} <= {name for name, outcome in outcomes.items() if outcome.finish_reason}:
        for output in core.step().outputs:
            outcomes.setdefault(output.request_id, Outcome()).take(output)
        core.check_integrity()
    assert "slow" not in outcomes and core.has_work()
    began, cpu = time.monotonic(), time.thread_time()
    for _ in range(20):
        core.step()
    assert time.monotonic() - began > 0.05 and time.thread_time() - cpu < 0.5 * (time.monotonic() - began)
    go.set()
    finish(core, outcomes)
    for request in requests.values():
        expect(core, request, outcomes)


def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone() -> None:
    def delay(seed: str) -> None:
        if seed == "crash":
            raise ZeroDivisionError("in the driver")

    core, _ = make_core(LAYOUTS["full"], PLAIN, grammar=make_grammar(delay))
    good = planned("good", "1")
    for request in (planned("bad", BROKEN), good, planned("crash", "crash")):
        core.add_request(request.to_request())
    outcomes = finish(core)
    assert outcomes["bad"].error == ("invalid_request", "structured_outputs.regex='broken'", "so it is", "")
    assert outcomes["crash"].error is not None and "ZeroDivisionError: in the driver" in outcomes["crash"].error[2]
    expect(core, good, outcomes)
    core.add_request(good.to_request())
    expect(core, good, finish(core))


@pytest.mark.parametrize("when", ["before", "after"])
def test_abort_of_a_request_whose_constraint_is_compiled(when: str) -> None:
    go = threading.Event()
    core, _ = make_core(LAYOUTS["full"], PLAIN, grammar=make_grammar(lambda seed: go.wait(30)))
    core.add_request(planned("a", "1").to_request())
    core.add_request(planned("b", "2").to_request())
    core.step()
    if when == "after":
        go.set()
        time.sleep(0.1)  # compiled, and not taken in
    core.abort(["a"])
    core.check_integrity()
    go.set()
    outcomes = finish(core)
    assert outcomes["a"].finish_reason == "abort" and not outcomes["a"].tokens
    expect(core, planned("b", "2"), outcomes)


def test_a_dead_engine_forgets_what_it_compiles() -> None:
    go = threading.Event()
    core, executor = make_core(LAYOUTS["full"], PLAIN, grammar=make_grammar(lambda seed: go.wait(30)))
    core.add_request(planned("free").to_request())
    core.add_request(planned("slow", "1").to_request())

    def fail(*args: object) -> None:
        raise RuntimeError("the device fell off the bus")

    executor.execute = fail  # type: ignore[method-assign]
    news = core.step()
    assert Counter(output.error[0] for output in news.outputs if output.error) == {"engine_dead": 2}
    assert not core.has_work()
    go.set()
    core.shutdown()


def test_siblings_share_their_prompt() -> None:
    core, _ = make_core(LAYOUTS["full"], PLAIN)
    siblings = [planned(f"s-{i}", f"seed {i}", parent="s") for i in range(4)]
    siblings = [replace(s, prompt=tuple(range(12))) for s in siblings]
    for request in siblings:
        core.add_request(request.to_request())
    outcomes = finish(core)
    for request in siblings:
        expect(core, request, outcomes)
    first, *others = sorted(outcome.num_cached_tokens for outcome in outcomes.values())
    assert first == 0 and min(others) >= 8


# -- ends --------------------------------------------------------------------------------------------------------------
def test_a_token_that_the_matcher_refuses_ends_the_request_with_an_error() -> None:
    """As where the other parameters leave nothing that the mask allows: the token is not shown."""
    core, executor = make_core(LAYOUTS["full"], PLAIN)
    free, request = planned("free"), planned("a", "1")
    truth, _ = alone(core.scheduler.kv.layout, [1, 2, 3], request.params, [], 64)
    sample = executor.sample
    rounds = 0

    def spoilt(step_id: int, masks: Masks) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 4 and masks.row.size:
            masks.bits[:] = ~masks.bits
        sample(step_id, masks)

    executor.sample = spoilt  # type: ignore[method-assign]
    core.add_request(request.to_request())
    core.add_request(free.to_request())
    outcomes = finish(core)
    assert len(truth) > 4 and outcomes["a"].tokens == truth[:3]
    assert outcomes["a"].error is not None and "no token is left" in outcomes["a"].error[2]
    expect(core, free, outcomes)


def test_an_engine_without_a_grammar_refuses() -> None:
    core, _ = make_core(LAYOUTS["full"], PLAIN)
    core.scheduler.states.constraints = None
    with pytest.raises(ValueError, match="no grammar driver"):
        core.add_request(planned("a", "1").to_request())
    assert not core.has_work()


def test_an_error_of_sample_ends_the_engine() -> None:
    core, executor = make_core(LAYOUTS["full"], PLAIN)

    def fail(*args: object) -> None:
        raise RuntimeError("the device fell off the bus")

    executor.sample = fail  # type: ignore[method-assign]
    core.add_request(planned("a", "1").to_request())
    outcomes = finish_dead(core)
    assert outcomes["a"].error is not None and outcomes["a"].error[0] == "engine_dead"
