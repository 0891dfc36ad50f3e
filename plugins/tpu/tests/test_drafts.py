"""Drafters that read tokens, at work with the JAX worker: the tokens are those of the torch engine without drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax_engines import VOCAB_SIZE, jax_engine, tokens_of, torch_engine, worker_of

from engine import LLM, SamplingParams
from engine.interfaces.drafter import Drafts
from engine.types.errors import ConfigError, EngineError
from engine.types.params import SamplingParams as Params
from engine.types.plan import GivenDrafts, LeftSlots, NewSlot, StepPlan, StepResult
from engine.types.structured_outputs import StructuredOutputsParams
from engine_tpu.buckets import Buckets
from engine_tpu.drafting import Drafting
from engine_tpu.results import RunningStep

ALWAYS = {"adaptive": "false", "num_tokens": "3"}


def repeating(number: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Prompts that repeat themselves, so that there is something to draft."""
    rng = np.random.default_rng(number)
    return [(rng.integers(0, VOCAB_SIZE, rng.integers(2, 7)).tolist() * n)[:n] for n in lengths]


def drafting_engine(model: Any, drafter: str, **settings: Any) -> LLM:
    """An engine on the JAX worker with this drafter, which always drafts."""
    return jax_engine(model, drafter=drafter, more_options={"drafter": ALWAYS}, **settings)


def speculation(llm: LLM) -> Any:
    """What the scheduler has learnt of drafts."""
    return llm.llm_engine.client.core.scheduler.drafts.speculation  # type: ignore[attr-defined]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(1, 40),
        "min_tokens": st.sampled_from([0, 1]),
        "stop_token_ids": st.sampled_from([[], list(range(30))]),
        "logprobs": st.sampled_from([None, 2]),
        "ignore_eos": st.just(True),
    }
)

LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 1}
"""So many tokens of five requests find no room at once."""


@pytest.mark.parametrize(
    ("drafter", "examples"),
    [("ngram", 3), ("suffix", 3), *(pytest.param(name, 25, marks=pytest.mark.slow) for name in ("ngram", "suffix"))],
    ids=["ngram", "suffix", "ngram-long", "suffix-long"],
)
def test_drafts_change_nothing(drafter: str, examples: int, checkpoints: Any) -> None:
    """Under any schedule, with preemption, prefix hits, penalties and early ends; nothing is compiled in service, and
    a step without drafts waits for none before it."""
    folder = checkpoints("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    with torch_engine(folder) as other, drafting_engine(folder, drafter) as mine:
        runner = worker_of(mine)._runner
        waits, inside = [], []
        result, execute = RunningStep.result, runner.execute

        def waited(step: RunningStep, timeout: float | None = None) -> StepResult:
            waits.extend(inside)
            return result(step, timeout)

        def watched(plan: StepPlan) -> Any:
            inside[:] = [plan.num_drafts is not None]
            future = execute(plan)
            inside.clear()
            return future

        @example([(n, LONG | {"temperature": t}) for n, t in ((19, 0.0), (12, 0.3), (33, 0.0), (8, 1.0), (45, 0.0))], 0)
        @given(st.lists(st.tuples(st.integers(1, 45), PARAMS), min_size=2, max_size=7), st.integers(0, 9))
        @settings(
            max_examples=examples, deadline=None, derandomize=examples < 10, suppress_health_check=list(HealthCheck)
        )
        def run(requests: list[tuple[int, dict[str, Any]]], number: int) -> None:
            prompts = repeating(number, tuple(length for length, _ in requests))
            params = [SamplingParams(**one) for _, one in requests]
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            found, wanted = (llm.generate(given, params, use_tqdm=False) for llm in (mine, other))
            for a, b in zip(found, wanted, strict=True):
                assert a.outputs[0].token_ids == b.outputs[0].token_ids
                assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
                for mine_at, other_at in zip(a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=True):
                    for token in set(mine_at) & set(other_at):
                        assert mine_at[token].logprob == pytest.approx(other_at[token].logprob, abs=1e-3)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunningStep, "result", waited)
            patch.setattr(runner, "execute", watched)
            run()
        assert all(waits), "a step without drafts has waited"
        assert speculation(mine).num_drafts > speculation(mine).num_accepted > 0
        assert runner._steps.compiled.met == 0


def test_drafts_under_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of each position depend on the drafts before it, proposed or forced."""
    choices = ["the dog and the dog and the dog and the cat", "the dog and the dog and a fox", "a dog"]
    prompts = [[5, 6, 7, 5, 6, 7], [20, 21, 20, 21], [9, 9, 9, 9]]
    params = [
        SamplingParams(temperature=t, seed=n, max_tokens=24, structured_outputs=StructuredOutputsParams(choice=choices))
        for n, t in enumerate((0.0, 1.0, 0.5))
    ]
    params[2].structured_outputs = None
    with torch_engine("tiny") as llm:
        wanted = tokens_of(llm, prompts, params)
    with drafting_engine("tiny", "ngram") as llm:
        runner, told = worker_of(llm)._runner, []
        drafts = runner.drafts
        monkeypatch.setattr(runner, "drafts", lambda step_id: told.append(drafts(step_id)) or told[-1])
        assert tokens_of(llm, prompts, params) == wanted
        assert any(any(row) for rows in told for row in rows), "no constrained row had drafts"


def test_drafters_that_are_refused(checkpoints: Any) -> None:
    """At the start, with the reason."""
    folder = checkpoints("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    for drafter in ("eagle", "medusa", "mtp", "draft_model"):
        with pytest.raises(EngineError, match="computes with torch, the platform with jax"):
            jax_engine(folder, drafter=drafter)
    with pytest.raises(ConfigError, match=r"set --drafter\.acceptance exact"):
        jax_engine(folder, drafter="ngram", more_options={"drafter": {"acceptance": "rejection"}})


def test_a_drafter_that_fails(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one request: that one ends with the error, the others go on."""
    folder = checkpoints("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    prompts = repeating(1, (12, 9, 15))
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 3
    with torch_engine(folder) as llm:
        wanted = tokens_of(llm, prompts, params)
    with drafting_engine(folder, "ngram", platform={"warm_up": False}) as llm:
        drafter = worker_of(llm)._runner._drafting._drafter

        def enter(new: NewSlot) -> None:
            if new.num_prompt_tokens == 9:
                raise RuntimeError("nine")

        monkeypatch.setattr(drafter, "enter", enter)
        with pytest.raises(EngineError, match="raised RuntimeError: nine") as caught:
            tokens_of(llm, prompts, params)
        found = [list(one.outputs[0].token_ids) for one in caught.value.outputs]  # type: ignore[attr-defined]
        assert [found[0], found[2]] == [wanted[0], wanted[2]] and found[1] == []


# -- the host's side, without an engine --------------------------------------------------------------------------------
class Scripted:
    """A drafter that tells what it sees, and proposes what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.answer = Drafts(np.array([[1, 2], [3, 4]], np.int32), np.array([2, 1], np.int32))

    def enter(self, new: NewSlot) -> None:
        self.seen.append(("enter", new.slot))

    def leave(self, slot: int, num_tokens: int, session: Any) -> None:
        self.seen.append(("leave", slot, session.tokens[slot, :num_tokens].tolist()))

    def propose(self, rows: Any, session: Any) -> Drafts:
        tokens = zip(rows.slot, rows.num_tokens, strict=True)
        self.seen.append([session.tokens[slot, :n].tolist() for slot, n in tokens])
        return self.answer


def new_slot(slot: int, tokens: list[int]) -> NewSlot:
    return NewSlot(
        slot=slot, request_id=f"r{slot}", token_ids=np.array(tokens, np.int32), num_prompt_tokens=len(tokens),
        params=Params(seed=1), stop_token_ids=np.empty(0, np.int32),
    )  # fmt: skip


def plan_of(slots: list[int], computed: list[int], drafts: list[int] | None = None, **more: Any) -> StepPlan:
    counts = np.array(drafts or [0] * len(slots), np.int32)
    made: dict[str, Any] = {
        "step_id": 0, "slot_of_row": np.array(slots, np.int32), "num_computed": np.array(computed, np.int32),
        "num_tokens": 1 + counts, "samples": np.ones(len(slots), bool), "num_decodes": 0, "new_slots": [],
        "new_blocks": [], "num_drafts": None if drafts is None else counts,
    }  # fmt: skip
    return StepPlan(**(made | more))


def running(tokens: list[list[int]]) -> RunningStep:
    return RunningStep(0, (), lambda arrays: StepResult(step_id=0, tokens=np.array(tokens, np.int32)))


def test_what_a_drafter_sees() -> None:
    """Tokens of steps that are under way are waited for, those of requests that have left are nobody's, and drafts come
    back as a plan's own, beside those that came with it."""
    drafter = Scripted()
    candidate = SimpleNamespace(name="scripted", fault=lambda asked, error: error)
    drafting = Drafting(drafter, candidate, 5, 30)  # type: ignore[arg-type]
    drafting.begin(plan_of([], [], new_slots=[new_slot(0, [7, 8]), new_slot(2, [5]), new_slot(3, [6])]))
    first = np.array([0, 1, 2])
    step = drafting.drawn(running([[9], [11], [12]]), np.array([0, 2, 3]), np.array([2, 1, 1]), first)
    given = GivenDrafts(row=np.array([2], np.int32), tokens=np.array([[20, 21]], np.int32))
    plan = drafting.begin(plan_of([0, 2, 3], [2, 1, 1], [2, 2, 2], given_drafts=given))
    assert step.taken and drafter.seen[-1] == [[7, 8, 9], [5, 11]]
    assert plan.num_drafts is not None and plan.given_drafts is not None
    assert plan.num_drafts.tolist() == [2, 1, 2] and plan.num_tokens.tolist() == [3, 2, 3] and plan.num_decodes == 0
    assert plan.given_drafts.row.tolist() == [0, 1, 2]
    assert plan.given_drafts.tokens.tolist() == [[1, 2], [3, -1], [20, 21]]

    late = drafting.drawn(running([[1, 13]]), np.array([0]), np.array([3]), np.array([0]))
    left = LeftSlots(slot=np.array([0], np.int32), num_tokens=np.array([3], np.int32))
    drafting.begin(plan_of([], [], left_slots=left, new_slots=[new_slot(0, [1, 2, 3, 4])]))
    assert drafter.seen[-2:] == [("leave", 0, [7, 8, 9]), ("enter", 0)]
    late.result()
    drafter.answer = Drafts(np.array([[5]], np.int32))
    plan = drafting.begin(plan_of([0], [3], [1]))
    assert drafter.seen[-1] == [[1, 2, 3, 4]], "a token of the request that was there before"
    drafter.answer = Drafts(np.array([[5]], np.int32), np.zeros(1, np.int32))
    plan = drafting.begin(plan_of([0], [3], [1]))
    assert plan.num_tokens.tolist() == [1] and plan.num_decodes == 1 and plan.given_drafts is None


@pytest.mark.parametrize(
    "answer",
    [
        Drafts(np.zeros((1, 2), np.int32)),  # type: ignore[arg-type]
        Drafts(np.zeros((2, 2), np.int32), np.array([3, 1], np.int32)),  # type: ignore[arg-type]
        Drafts(np.zeros((2, 2), np.int32), None, np.ones((2, 2, 5))),  # type: ignore[arg-type]
        Drafts(np.zeros((2, 2), np.int32), None, None, np.array([-1, 0], np.int32)),  # type: ignore[arg-type]
    ],
    ids=["shape", "counts", "probabilities", "tree"],
)
def test_answers_of_the_wrong_form(answer: Drafts) -> None:
    """Are told as the drafter's."""
    drafter = Scripted()
    drafter.answer = answer
    candidate = SimpleNamespace(name="scripted", fault=lambda asked, error: error)
    drafting = Drafting(drafter, candidate, 5, 30)  # type: ignore[arg-type]
    drafting.begin(plan_of([], [], new_slots=[new_slot(0, [7, 8]), new_slot(1, [5])]))
    with pytest.raises(EngineError, match="chains that are certain"):
        drafting.begin(plan_of([0, 1], [1, 0], [2, 2]))


def test_buckets_hold_every_draft() -> None:
    """Each step in which all rows have drafts has a bucket that is compiled at the start."""
    buckets = Buckets(40, 512, [], [], 5)
    made = set(buckets)
    for num_rows in range(1, 41):
        for num_draws in (num_rows, num_rows + 5, 6 * num_rows):
            for num_tokens in (num_draws, min(512, num_draws + 100), 512):
                found = buckets.of(num_rows, num_tokens, num_draws, False)
                assert found in made and found.draws >= num_draws
