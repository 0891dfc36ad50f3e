"""What single steps plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cores import LAYOUTS, layout_of, make_core, sliding
from paged_worker import alone
from steps import SETTINGS, finish, make_scheduler, plan, request, rows, run

from engine.interfaces.kv_connector import Transferred
from engine.loop.engine_core import EngineCore
from engine.types.errors import ContractError, InvalidRequestError, PromptTooLongError
from engine.types.outputs import CoreOutput
from engine.types.plan import BROKEN, StepResult
from engine.types.request import FinishReason
from engine_reference.evictor_lru import LRU


# -- rows and budget ---------------------------------------------------------------------------------------------------
def test_a_prompt_is_cut_into_chunks_and_decodes_come_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(request("a", 5))
    assert rows(plan(scheduler)) == [(0, 0, 5, True)]
    finish(scheduler)
    scheduler.add(request("b", 20))
    made = plan(scheduler)
    assert rows(made) == [(0, 5, 1, True), (1, 5, 7, False)] and made.num_decodes == 1  # 5 found in the cache
    assert [new.request_id for new in made.new_slots] == ["b"]
    assert rows(plan(scheduler)) == [(0, 6, 1, True), (1, 12, 7, False)]
    made = plan(scheduler)
    assert rows(made) == [(0, 7, 1, True), (1, 19, 1, True)] and not made.new_slots


def test_short_extends_stand_before_prefills() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", [1] * 13))
    scheduler.add(request("b", [2] * 3))
    scheduler.add(request("c", [3] * 7))
    assert [row[2] for row in rows(plan(scheduler))] == [3, 7, 13]


def test_nobody_is_admitted_while_decodes_need_the_whole_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=3)
    for name in "abcd":
        scheduler.add(request(name, [ord(name)], max_tokens=3))
    for _ in range(3):
        made = plan(scheduler)
        assert made.slot_of_row.tolist() == [0, 1, 2]
        finish(scheduler)
    assert [new.request_id for new in plan(scheduler).new_slots] == ["d"]


def test_slots_limit_admission() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name))
    assert plan(scheduler).num_rows == 2 and scheduler.num_waiting == 1


# -- steps in flight ---------------------------------------------------------------------------------------------------
def test_placeholders_stop_at_the_known_length() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 5, max_tokens=3))
    for computed in (0, 5, 6):
        assert plan(scheduler).num_computed.tolist() == [computed]
    assert scheduler.schedule() is None
    finish(scheduler)
    finish(scheduler)
    (last,) = finish(scheduler)
    assert last.finish_reason is FinishReason.LENGTH and not scheduler.has_work


def test_the_models_length_ends_a_request() -> None:
    scheduler = make_scheduler(max_model_len=8)
    scheduler.add(request("a", 6, max_tokens=100))
    plan(scheduler), plan(scheduler)
    assert scheduler.schedule() is None
    assert finish(scheduler)[0].finish_reason is None
    assert finish(scheduler)[0].finish_reason is FinishReason.LENGTH


def test_a_late_stop_drops_the_surplus_token_and_keeps_slot_and_pages_until_it_returns() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("a", 5, eos_token_ids=[7]))
    scheduler.add(request("b", 5))
    plan(scheduler), plan(scheduler)
    (output,) = finish(scheduler)
    assert output.finish_reason is FinishReason.STOP and output.stop_reason is None and output.new_token_ids == [7]
    assert scheduler.kv.pool.num_deferred_free and scheduler.slots.num_free == 0
    assert scheduler.schedule() is None  # the slot is still named by step 2
    assert finish(scheduler) == []
    assert plan(scheduler).new_slots[0].request_id == "b" and scheduler.kv.pool.num_deferred_free == 0


def test_stop_ids_and_min_tokens() -> None:
    scheduler = make_scheduler()
    many = list(range(20, 40))
    scheduler.add(request("few", 5, stop_token_ids=[7], eos_token_ids=[9], min_tokens=2))
    scheduler.add(request("many", 5, stop_token_ids=[7, *many], ignore_eos=True, eos_token_ids=[9]))
    made = plan(scheduler)
    assert made.new_slots[0].stop_token_ids.tolist() == [7, 9]
    assert made.new_slots[1].stop_token_ids.tolist() == [7, *many]
    few, other = finish(scheduler, 9)
    assert few.finish_reason is other.finish_reason is None  # too early; ignored
    plan(scheduler)
    few, other = finish(scheduler, 7)
    assert (few.finish_reason, few.stop_reason) == (FinishReason.STOP, 7)
    assert (other.finish_reason, other.stop_reason) == (FinishReason.STOP, 7)


# -- pages -------------------------------------------------------------------------------------------------------------
def test_a_decode_without_a_page_preempts_the_last_admitted() -> None:
    scheduler = make_scheduler(num_pages=5)  # 4 pages of 4 tokens
    scheduler.add(request("a", [1] * 8))
    scheduler.add(request("b", [2] * 8))
    plan(scheduler)
    finish(scheduler)
    assert plan(scheduler).slot_of_row.tolist() == [0]  # both want a page; b's are taken
    assert scheduler.num_preemptions == 1 and list(scheduler.running) == ["a"]
    assert [waiting.request_id for waiting in scheduler.policy] == ["b"]
    finish(scheduler)
    ends = [output.request_id for output in run(scheduler) if output.finish_reason is FinishReason.LENGTH]
    assert ends == ["a", "b"] and scheduler.num_preemptions == 1


def test_a_preempted_request_keeps_the_tokens_that_return() -> None:
    scheduler = make_scheduler(num_pages=5)
    scheduler.add(request("a", [1] * 8))
    scheduler.add(request("b", [2] * 7))
    plan(scheduler)  # step 1: both prompts
    assert scheduler.schedule() is None  # a wants a third page: b's are taken, and pending
    b = scheduler.requests["b"]
    assert b in scheduler.states.draining and b.slot >= 0  # step 1 names it
    outputs = {output.request_id: output for output in finish(scheduler)}
    assert outputs["b"].new_token_ids == [7]
    assert b.slot == -1 and b.token_ids.tolist() == [*[2] * 7, 7]


def test_while_pages_are_pending_nobody_else_is_preempted() -> None:
    scheduler = make_scheduler(num_pages=7)  # 6 pages
    for name in "abc":
        scheduler.add(request(name, [ord(name)] * 8))
    plan(scheduler)
    assert scheduler.kv.pool.num_available == 0
    assert scheduler.schedule() is None  # c was preempted; its pages are pending, a and b wait for them
    assert scheduler.num_preemptions == 1
    assert scheduler.schedule() is None and scheduler.num_preemptions == 1
    finish(scheduler)
    assert plan(scheduler).slot_of_row.tolist() == [0, 1] and scheduler.num_preemptions == 1


def test_a_request_that_outgrows_the_cache_ends_with_a_typed_error_and_others_go_on() -> None:
    scheduler = make_scheduler(num_pages=4, max_num_seqs=2)  # 3 pages of 4 tokens
    scheduler.add(request("grows", 6, max_tokens=50))
    scheduler.add(request("small", [3, 3], max_tokens=2))
    ends = {output.request_id: output for output in run(scheduler) if output.finish_reason}
    assert ends["small"].finish_reason is FinishReason.LENGTH
    error = ends["grows"].error
    assert error is not None and error[0] == "kv_cache_too_small"
    assert "'grows'" in error[1] and "3" in error[2] and "--num-kv-pages" in error[3]


def test_a_prompt_that_can_never_fit_does_not_block_the_queue() -> None:
    scheduler = make_scheduler(num_pages=4)
    scheduler.add(request("huge", 13))
    scheduler.add(request("small", 4))
    (notice,) = scheduler.take_notices()
    assert (notice.request_id, notice.finish_reason) == ("huge", FinishReason.ERROR)
    assert [new.request_id for new in plan(scheduler).new_slots] == ["small"]


def test_a_prompt_is_admitted_only_where_all_of_it_will_find_pages() -> None:
    scheduler = make_scheduler(num_pages=11, max_num_batched_tokens=8)  # 10 pages
    scheduler.add(request("a", [1] * 24))  # 6 pages, 2 a step
    scheduler.add(request("b", [2] * 20))
    for _ in range(3):
        assert plan(scheduler).num_rows == 1
    made = plan(scheduler)
    assert made.num_rows == 1 and made.num_decodes == 1  # b's 5 pages do not fit beside a's 7


def test_blocks_that_left_the_window_are_given_back() -> None:
    scheduler = make_scheduler(layout_of(sliding(6)), num_pages=100)
    scheduler.add(request("a", 20, max_tokens=20))
    plan(scheduler)
    finish(scheduler)
    held = []
    while scheduler.running:
        plan(scheduler)
        held.append(scheduler.kv.pool.num_held - scheduler.kv.pool.num_deferred_free)
        finish(scheduler)
    assert max(held) <= 3  # 6 tokens on blocks of 4, and the next


# -- prefix hits -------------------------------------------------------------------------------------------------------
def test_a_prefix_is_found_to_the_token_and_never_the_whole_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 16, max_tokens=1))
    plan(scheduler)
    finish(scheduler)
    scheduler.add(request("b", 16))
    scheduler.add(request("c", 18))
    made = plan(scheduler)
    assert made.num_computed.tolist() == [15, 16] and made.num_tokens.tolist() == [1, 2]
    assert made.copies is not None and made.copies.source.size == 1
    outputs = {output.request_id: output for output in finish(scheduler)}
    assert (outputs["b"].num_cached_tokens, outputs["c"].num_cached_tokens) == (15, 16)
    assert (scheduler.admission.prefix_queries, scheduler.admission.prefix_hits) == (16 + 16 + 18, 15 + 16)


def test_salts_share_nothing() -> None:
    scheduler = make_scheduler(max_num_seqs=8)
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        scheduler.add(request(name, 9, cache_salt=salt))
        plan(scheduler)
    assert scheduler.admission.prefix_hits == 8  # d finds b's


def test_requests_of_one_step_share_what_the_first_of_them_computes() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", [*range(12), 50]))
    scheduler.add(request("b", [*range(12), 60, 61]))
    made = plan(scheduler)
    assert sorted(rows(made)) == [(0, 0, 13, True), (1, 12, 2, True)]
    table = scheduler.kv.tables[0]
    assert table.live(0)[:3].tolist() == table.live(1)[:3].tolist()


def test_output_is_found_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4, max_tokens=5))
    while scheduler.has_work:
        plan(scheduler)
        finish(scheduler)
    scheduler.add(request("b", [0, 1, 2, 3, 7, 7, 7, 7, 7]))
    assert plan(scheduler).num_computed.tolist() == [8]


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(request(name, 16, max_tokens=1))
        assert plan(scheduler).num_tokens.tolist() == [16]
        finish(scheduler)
    assert len(scheduler.kv.index) == scheduler.admission.prefix_queries == scheduler.kv.pool.num_evictable == 0


def test_a_reset_forgets_what_running_requests_hold_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 13))
    plan(scheduler)
    scheduler.kv.reset_prefix_cache()
    scheduler.check_integrity()
    scheduler.add(request("b", 13))
    plan(scheduler)
    assert scheduler.admission.prefix_hits == 0
    while scheduler.has_work:
        finish(scheduler)
        scheduler.schedule()
    assert scheduler.kv.pool.num_held == 0


def test_siblings_wait_for_the_first_and_share_its_pages() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for k in range(3):
        scheduler.add(request(f"p-{k}", 14, parent="p"))
    scheduler.add(request("other", [9, 9]))
    assert rows(plan(scheduler)) == [(0, 0, 8, False)]
    made = plan(scheduler)  # the leader's last 6 tokens; the followers find 12 of 14
    assert rows(made) == [(1, 12, 2, True), (0, 8, 6, True)]
    made = plan(scheduler)
    assert {new.request_id for new in made.new_slots} == {"p-2", "other"}
    assert scheduler.admission.prefix_hits == 12 + 13  # the last one copies what the leader's last block holds


def test_an_aborted_leader_hands_over() -> None:
    scheduler = make_scheduler()
    for k in range(3):
        scheduler.add(request(f"p-{k}", 14, parent="p"))
    scheduler.abort(["p-0"])
    scheduler.check_integrity()
    assert {new.request_id for new in plan(scheduler).new_slots} == {"p-1", "p-2"}


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_bad_requests_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    with pytest.raises(InvalidRequestError, match="'a'"):
        scheduler.add(request("a"))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        scheduler.add(request("b", []))
    with pytest.raises(PromptTooLongError, match="64 tokens"):
        scheduler.add(request("c", 64))
    assert list(scheduler.requests) == ["a"]


@pytest.mark.parametrize("tokens", [[-1], [3, 3], []])
def test_a_result_that_does_not_fit_the_plan_is_found_out(tokens: list[int]) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    made = plan(scheduler)
    with pytest.raises(ContractError, match="step 1"):
        scheduler.update(StepResult(step_id=made.step_id, tokens=np.array(tokens, np.int32)))


@pytest.mark.parametrize("errors", [{0: ("code", "a")}, {0: ("code", "a", "b", 3)}, {0: []}])
def test_errors_that_are_none_are_found_out(errors: Any) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    step = plan(scheduler).step_id
    with pytest.raises(ContractError, match="error of row 0"):
        scheduler.update(StepResult(step_id=step, tokens=np.array([BROKEN], np.int32), errors=errors))


@pytest.mark.parametrize("pages", [[-1], [10_000], [[1]], [1.0]])
def test_failed_pages_that_are_none_are_found_out(pages: list[Any]) -> None:
    scheduler = make_scheduler(swap_pages=1)
    scheduler.add(request("a"))
    step = plan(scheduler).step_id
    half = scheduler.connectors.members[0].half
    half.take = lambda news: Transferred(failed=np.array(pages))  # type: ignore[method-assign]
    with pytest.raises(ContractError, match="take names pages"):
        scheduler.update(StepResult(step_id=step, tokens=np.array([3], np.int32), news={"host": [b"1"]}))


def test_the_worker_and_its_oracle_agree() -> None:
    core, _ = make_core(LAYOUTS["full and sliding"], SETTINGS)
    new = request("a", [3, 1, 4, 1, 5], max_tokens=20, logprobs=2)
    core.add_request(new)
    tokens = [token for output in drive(core) for token in output.new_token_ids]
    expected = alone(core.scheduler.kv.layout, [3, 1, 4, 1, 5], new.params, [], 64)
    assert tokens == expected[0] and len(tokens) == 20


def drive(core: EngineCore) -> list[CoreOutput]:
    outputs: list[CoreOutput] = []
    while core.has_work():
        outputs += core.step().outputs
    return outputs


class CountingLRU(LRU):
    """Counts its calls since the last look."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.calls: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        if name in ("on_commit", "on_touch", "on_release", "victims"):
            self.calls[name] = self.calls.get(name, 0) + 1
        return super().__getattribute__(name)


def test_the_evictor_is_called_once_a_step_for_each_kind_of_news() -> None:
    settings = dataclasses.replace(SETTINGS, num_pages=24, max_num_seqs=8, hold=False)
    core, _ = make_core(LAYOUTS["full"], settings, evictor=CountingLRU)
    evictor = core.scheduler.kv.pool._evictor
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 13, 16).tolist()
    most: dict[str, int] = {}
    for i in range(40):
        core.add_request(request(f"r{i}", [*shared[: rng.integers(0, 17)], *rng.integers(0, 13, 9).tolist()]))
    while core.has_work():
        evictor.calls = {}
        core.step()
        for name, count in evictor.calls.items():
            most[name] = max(most.get(name, 0), count)
    assert most == {"on_commit": 1, "on_touch": 1, "on_release": 1, "victims": 1}


def test_plans_tell_who_has_left_and_whose_history_is_whose() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name, salt in (("a", "one"), ("b", None), ("c", "two")):
        scheduler.add(request(name, 3, max_tokens=2 if name == "a" else 4, cache_salt=salt))
    first = plan(scheduler)
    assert [(new.slot, new.cache_salt) for new in first.new_slots] == [(0, "one"), (1, None)]
    assert first.left_slots is None
    finish(scheduler)
    plan(scheduler)
    finish(scheduler)  # a has its two tokens
    later = plan(scheduler)
    assert later.left_slots is not None and [(new.slot, new.cache_salt) for new in later.new_slots] == [(0, "two")]
    assert (later.left_slots.slot.tolist(), later.left_slots.num_tokens.tolist()) == ([0], [5])
    finish(scheduler)
    scheduler.abort(["b"])
    last = plan(scheduler)
    assert last.left_slots is not None and last.left_slots.slot.tolist() == [1]
