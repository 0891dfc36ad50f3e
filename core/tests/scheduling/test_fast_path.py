"""The fast path gives the plans, outputs and pages that the scheduler's own way gives."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from cores import LAYOUTS
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import finish, make_scheduler, plan, request

from engine.scheduling.scheduler import Scheduler
from engine.types.errors import ContractError
from engine.types.outputs import CoreOutput
from engine.types.plan import StepPlan, StepResult

VOCAB = 13
LIMITS = {"num_pages": 40, "max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 48}


def make(**changes: Any) -> Scheduler:
    return make_scheduler(LAYOUTS[changes.pop("layout", "full")], **{**LIMITS, **changes})


def own_way(**changes: Any) -> Scheduler:
    """A scheduler that never takes the short way."""
    scheduler = make(**changes)
    scheduler.fast_path.begin = lambda plan: None  # type: ignore[method-assign]
    return scheduler


def columns(made: StepPlan) -> dict[str, Any]:
    """All that a plan says, in plain lists."""
    fields = {name: getattr(made, name) for name in made.__struct_fields__ if name not in ("new_slots", "new_blocks")}
    said = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}
    said["new_slots"] = [(new.slot, new.request_id, new.token_ids.tolist()) for new in made.new_slots]
    said["new_blocks"] = [(new.slot.tolist(), new.index.tolist(), new.page.tolist()) for new in made.new_blocks]
    for name in ("copies", "left_slots"):
        if (part := getattr(made, name)) is not None:
            said[name] = {column: values.tolist() for column, values in msgspec.structs.asdict(part).items()}
    return said


def give(scheduler: Scheduler, tokens: list[int]) -> list[CoreOutput]:
    """The oldest plan's result: these tokens, as far as it has rows."""
    made = scheduler.outstanding[0]
    drawn = np.where(made.samples, np.resize(tokens, made.num_rows), -1).astype(np.int32)
    outputs = scheduler.update(StepResult(step_id=made.step_id, tokens=drawn))
    scheduler.check_integrity()
    return [msgspec.structs.replace(output, queue_time=0.0, prefill_time=0.0) for output in outputs]


arrivals = st.tuples(
    st.just("add"),
    st.integers(1, 14),  # of a prompt; prompts share their beginning
    st.integers(1, 30),
    st.sampled_from([(), (3,), tuple(range(3, 13))]),
    st.sampled_from([0, 5]),
)
steps = st.tuples(st.just("step"), st.integers(1, 24), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
aborts = st.tuples(st.just("abort"), st.integers(0, 5))
resets = st.tuples(st.just("reset"))


@pytest.mark.parametrize("layout", ["full", "full and sliding", "full, blocks of 1", "full and state", "latent"])
@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(st.one_of(arrivals, steps, steps, aborts, resets), min_size=2, max_size=14),
    in_flight=st.integers(1, 3),
    caching=st.booleans(),
    num_pages=st.sampled_from([18, 40]),
)
def test_the_short_way_gives_what_the_own_way_gives(
    layout: str, actions: list[tuple[Any, ...]], in_flight: int, caching: bool, num_pages: int
) -> None:
    changes = {"layout": layout, "enable_prefix_caching": caching, "num_pages": num_pages}
    both = make(**changes), own_way(**changes)
    for number, action in enumerate(actions):
        if action[0] == "add":
            _, prompt, most, stops, at_least = action
            asked = request(
                f"r{number}", prompt, max_tokens=most, stop_token_ids=list(stops), min_tokens=min(at_least, most)
            )
            for scheduler in both:
                scheduler.add(asked)
        elif action[0] == "abort":
            for scheduler in both:
                scheduler.abort([f"r{action[1]}"])
        elif action[0] == "reset":
            for scheduler in both:
                scheduler.kv.reset_prefix_cache()
        else:
            for moment in range(action[1]):
                made = [scheduler.schedule() for scheduler in both]
                assert (made[0] is None) == (made[1] is None)
                if made[0] is not None and made[1] is not None:
                    assert columns(made[0]) == columns(made[1])
                if len(both[0].outstanding) >= in_flight or (made[0] is None and both[0].outstanding):
                    tokens = [token + moment for token in action[2]]
                    mine, theirs = (give(scheduler, [token % VOCAB for token in tokens]) for scheduler in both)
                    assert mine == theirs
                assert both[0].take_notices() == both[1].take_notices()
    short, own = both
    assert short.kv.pool.num_available == own.kv.pool.num_available
    assert short.generation_tokens == own.generation_tokens and short.admission.prefix_hits == own.admission.prefix_hits


def decoding(**changes: Any) -> Scheduler:
    """One request that decodes, a few steps after its prompt, in the short way."""
    scheduler = make(**changes)
    scheduler.vocab_size = scheduler.fast_path._vocab_size = VOCAB
    scheduler.add(request("r", 5, max_tokens=40, stop_token_ids=[3]))
    for _ in range(3):
        plan(scheduler)
        finish(scheduler)
    assert scheduler.fast_path.num_plans
    return scheduler


def test_the_short_way_is_taken() -> None:
    scheduler = decoding()
    scheduler._choose = lambda: pytest.fail("rows were chosen anew")  # type: ignore[method-assign]
    made = plan(scheduler)
    assert made.slot_of_row.tolist() == [0] and made.num_computed.tolist() == [7]
    assert [output.new_token_ids for output in finish(scheduler)] == [[7]]


def test_a_stop_token_ends_the_request() -> None:
    scheduler = decoding()
    plan(scheduler)
    (last,) = finish(scheduler, token=3)
    assert last.finish_reason is not None and last.stop_reason == 3 and not scheduler.running


@pytest.mark.parametrize(
    "result",
    [
        lambda step: StepResult(step_id=step + 1, tokens=np.array([7], np.int32)),
        lambda step: StepResult(step_id=step, tokens=np.array([VOCAB], np.int32)),
        lambda step: StepResult(step_id=step, tokens=np.array([-1], np.int32)),
        lambda step: StepResult(step_id=step, tokens=np.array([7, 7], np.int32)),
        lambda step: StepResult(step_id=step, tokens=np.array([7.0])),
        lambda step: "a result",
    ],
)
def test_garbage_is_refused_as_ever(result: Any) -> None:
    scheduler = decoding()
    made = plan(scheduler)
    with pytest.raises(ContractError):
        scheduler.update(result(made.step_id))
    assert scheduler.outstanding[0] is made


def test_logits_that_are_no_numbers_end_the_request() -> None:
    scheduler = decoding()
    made = plan(scheduler)
    scheduler.update(StepResult(step_id=made.step_id, tokens=np.array([-2], np.int32)))
    (notice,) = scheduler.take_notices()
    assert notice.error is not None and not scheduler.running
