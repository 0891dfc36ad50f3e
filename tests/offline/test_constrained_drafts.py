"""Drafts and jumps under constraints, with every grammar driver: the same tokens as without, in fewer steps."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from engine import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_pet": {"type": "string", "maxLength": 12},
        "kind_of_the_pet": {"enum": ["cat", "dog"]},
        "ages_of_its_friends": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name_of_the_pet", "kind_of_the_pet", "ages_of_its_friends"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, Any] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "(la ){8,12}(la|lo)!?"},
    "choice": {"choice": ["la la la la la la la la la", "la la la, said the cat", "one two three one two three"]},
    "later": {"regex": "( la){3,12}!"},
}
PROMPT = 'la la la la la la. the cat sat on the mat. {"name_of_the_pet": "Tom", "kind_of_the_pet": "cat"'


DRIVERS = ["choice", "xgrammar", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llguidance", "outlines"))]


@pytest.fixture(scope="module", params=DRIVERS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    if request.param != "choice" and importlib.util.find_spec(f"engine_{request.param}") is None:
        pytest.skip(f"engine-{request.param} is not installed")
    options = {"drafter.num_tokens": 6, "drafter.min_match": 1, "drafter.max_match": 3, "drafter.cost": 0.05}
    with LLM("tiny", dtype="float64", grammar=request.param, drafter="ngram", num_kv_pages=400, **options) as model:
        model.driver = request.param
        yield model


class Run(NamedTuple):
    """What requests got, and what it took: steps, drafts that were accepted, and tokens that were jumped over."""

    outputs: list[object]
    steps: int
    accepted: int
    jumped: int


def run(llm: LLM, params: list[SamplingParams], *, drafts: bool = False, jumps: bool = False) -> Run:
    scheduler = llm.llm_engine.client.core.scheduler
    speculation, jump_forward = scheduler.drafts.speculation, scheduler.drafts.jump_forward
    learned = jump_forward.learned
    before, accepted, jumped = llm.llm_engine.stats().step_id, speculation.num_accepted, learned.num_accepted
    scheduler.drafts.speculation = speculation if drafts else None
    scheduler.drafts.jump_forward = jump_forward if jumps else None
    try:
        found = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    finally:
        scheduler.drafts.speculation = speculation
        scheduler.drafts.jump_forward = jump_forward
    outputs = [
        (done.text, done.token_ids, done.finish_reason, done.logprobs is None or len(done.logprobs))
        for output in found
        for done in output.outputs
    ]
    steps = llm.llm_engine.stats().step_id - before
    return Run(outputs, steps, speculation.num_accepted - accepted, learned.num_accepted - jumped)


def requests(llm: LLM, kind: str) -> list[SamplingParams]:
    """Greedy and seeded ones."""
    if llm.driver == "choice" and kind != "choice":
        pytest.skip("it enforces choice alone")
    fields = dict(CONSTRAINTS[kind])
    if kind == "later":
        fields["start_after"] = llm.get_tokenizer().encode("!", False)
    constraint = StructuredOutputsParams(**fields)
    common = {"max_tokens": 48, "structured_outputs": constraint, "ignore_eos": kind == "later"}
    if kind == "later":
        common["logit_bias"] = {fields["start_after"][0]: 6.0}
    greedy = SamplingParams(temperature=0.0, **common)
    return [
        greedy,
        *(
            SamplingParams(temperature=0.9, seed=seed, **common, **more)
            for seed, more in enumerate(({"logprobs": 2, "n": 2}, {"min_tokens": 12, "stop": ["cat"]}))
        ),
        SamplingParams(temperature=0.0, max_tokens=20),
    ]


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_drafts_and_jumps_change_no_token(llm: LLM, kind: str) -> None:
    params = requests(llm, kind)
    plain, drafted = run(llm, params), run(llm, params, drafts=True)
    jumping, both = run(llm, params, jumps=True), run(llm, params, drafts=True, jumps=True)
    assert drafted.outputs == jumping.outputs == both.outputs == plain.outputs
    assert plain.accepted == plain.jumped == jumping.accepted == drafted.jumped == 0
    assert drafted.accepted and both.accepted
    if kind == "json":
        assert jumping.jumped and both.jumped
    if kind == "later":
        begun = [text for text, *_ in plain.outputs if re.search("!( la){3}", str(text))]
        assert begun, plain.outputs


def test_fewer_steps(llm: LLM) -> None:
    (greedy, *_) = requests(llm, "choice")
    plain, drafted = run(llm, [greedy]), run(llm, [greedy], drafts=True)
    assert drafted.outputs == plain.outputs
    assert drafted.steps < plain.steps


def test_a_jump_takes_one_step(llm: LLM) -> None:
    """The second time it is known how the model spells what is forced."""
    text = "a_name_that_is_long_enough"
    constraint = StructuredOutputsParams(choice=[text])
    params = [SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=constraint)]
    plain, first, second = run(llm, params), run(llm, params, jumps=True), run(llm, params, jumps=True)
    assert second.outputs == first.outputs == plain.outputs and plain.outputs[0][0] == text  # type: ignore[index]
    assert plain.steps >= 8 and first.steps <= plain.steps
    assert second.steps <= 4, "the prompt, the first token, the others"


def test_it_can_be_turned_off() -> None:
    with LLM("tiny", enable_jump_forward=False, num_kv_pages=100) as model:
        assert model.llm_engine.client.core.scheduler.drafts.jump_forward is None


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"executor": "process"}, {"tensor_parallel_size": 2}])
def test_ranks_in_processes_of_their_own(more: dict[str, Any]) -> None:
    """Their drafts come to the core before they sample, and what is forced goes to them with the plan."""
    texts = ["la la la la la la la la", "a_name_that_is_long_enough"]
    params = [
        SamplingParams(
            temperature=temperature, seed=1, max_tokens=60, structured_outputs=StructuredOutputsParams(choice=choice)
        )
        for temperature, choice in ((0.0, texts[:1]), (0.0, texts[1:]), (0.9, texts))
    ]
    common: dict[str, Any] = {"dtype": "float64", "num_kv_pages": 200, "max_model_len": 256, "grammar": "choice"}
    found = []
    for settings in (
        {"enable_jump_forward": False},
        {"drafter": "ngram", "drafter.min_match": 1, "drafter.cost": 0.05, **more},
    ):
        with LLM("tiny", **common, **settings) as model:
            outputs = model.generate(["la la la la"] * 3, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            stats = model.llm_engine.stats()
    assert found[0] == found[1]
    assert stats.num_accepted_drafts + stats.num_accepted_jump_tokens > 5 and stats.num_drafts and stats.num_jump_tokens
