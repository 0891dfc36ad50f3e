"""A driver that raises over one request costs that request, with an error that names the driver; others go on.

The table in docs/plugins/driver.md says for which drivers that holds; each of its rows is planted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.types.errors import ContractError, EngineDeadError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_reference.connector_host.scheduler_half import HostScheduler
from engine_reference.drafter_ngram.ngram import NgramDrafterBody
from engine_reference.grammar_choice import ChoiceBody, ChoiceMatcher
from engine_reference.logits_processors.processors import LogitBiasBody
from engine_reference.policy_fcfs import FCFS
from engine_reference.tokenizer_hf.tokenizer import HFTokenizerBody

Patch = Callable[..., None]

PROMPTS = {"good-0": [11, 40, 41, 42] * 4, "bad": [90, 91, 92] * 5, "good-1": [50, 51, 52, 53, 54] * 3}


class Bomb(RuntimeError):
    """No error of Engine's own."""


def over(name: str, patch: Patch, owner: type, method: str, is_bad: Callable[..., bool]) -> None:
    """Have a method of a driver raise where it is asked about the bad request."""
    real = getattr(owner, method)

    def spoilt(self: Any, *args: Any) -> Any:
        if is_bad(self, *args):
            raise Bomb(f"{name} went off")
        return real(self, *args)

    patch(owner, method, spoilt)


def mark(patch: Patch) -> Callable[[Any], bool]:
    """Tells the matchers of the bad request: the only one whose text begins with a b."""
    real, marked = ChoiceBody.compile, list[Any]()

    def compile_marked(self: ChoiceBody, constraint: Any, ends: Sequence[int]) -> Any:
        matcher = real(self, constraint, ends)
        if constraint.choice[0].startswith("b"):
            marked.append(matcher)
        return matcher

    patch(ChoiceBody, "compile", compile_marked)
    return lambda matcher: any(matcher is other for other in marked)


CHOICES = {"good-0": "a long answer", "bad": "b is no answer", "good-1": "another answer"}
CONSTRAINED: dict[str, dict[str, Any]] = {
    name: {"structured_outputs": StructuredOutputsParams(choice=[text])} for name, text in CHOICES.items()
}
STOPPED = {**CONSTRAINED, "bad": {**CONSTRAINED["bad"], "stop_token_ids": [77], "logit_bias": {77: 99.0}}}
"""Where its mask is missing, the bad request draws a token that ends it."""
BIASED: dict[str, dict[str, Any]] = {"bad": {"logit_bias": {77: 3.0}}}
NGRAM = {"drafter": "ngram", "drafter.num_tokens": 3}


def grammar_compile(patch: Patch) -> None:
    over("compile", patch, ChoiceBody, "compile", lambda self, constraint, ends: constraint.choice[0][0] == "b")


def grammar_accept(patch: Patch) -> None:
    marked = mark(patch)
    over("accept", patch, ChoiceMatcher, "accept", lambda self, tokens: marked(self))


def grammar_masks(patch: Patch) -> None:
    marked, calls = mark(patch), list[Any]()

    def is_bad(self: ChoiceBody, matchers: Sequence[Any], *_: Any) -> bool:
        calls.extend(filter(marked, matchers))  # the first is made when it is compiled
        return any(marked(matcher) and calls.count(matcher) > 1 for matcher in matchers)

    over("masks", patch, ChoiceBody, "fill_masks", is_bad)


def grammar_rollback(patch: Patch) -> None:
    marked = mark(patch)
    over("rollback", patch, ChoiceMatcher, "rollback", lambda self, n: marked(self))


def grammar_forced(patch: Patch) -> None:
    over("forced", patch, ChoiceMatcher, "forced_bytes", mark(patch))


def processor_enter(patch: Patch) -> None:
    over("enter", patch, LogitBiasBody, "enter", lambda self, new: True)


def processor_apply(patch: Patch) -> None:
    over("apply", patch, LogitBiasBody, "apply", lambda self, logits, rows: True)


def drafter_enter(patch: Patch) -> None:
    over("enter", patch, NgramDrafterBody, "enter", lambda self, new: new.token_ids[0] == PROMPTS["bad"][0])


def drafter_alone(patch: Patch) -> None:
    over("propose", patch, NgramDrafterBody, "propose", lambda self, rows, session: True)


class BrokenStream:
    """Of a tokenizer: raises at the first token."""

    def push(self, ids: Sequence[int]) -> str:
        raise Bomb("stream went off")


def tokenizer_stream(patch: Patch) -> None:
    real = HFTokenizerBody.stream

    def stream(self: HFTokenizerBody, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> Any:
        return BrokenStream() if list(prompt) == PROMPTS["bad"] else real(self, skip_special_tokens, prompt)

    patch(HFTokenizerBody, "stream", stream)


def push(patch: Patch) -> None:
    over("push", patch, FCFS, "push", lambda self, request: request.request_id.startswith("bad"))


@pytest.mark.parametrize(
    ("plant", "params", "settings", "names"),
    [
        (grammar_compile, CONSTRAINED, {}, "driver 'choice' for grammar"),
        (grammar_accept, CONSTRAINED, {}, "driver 'choice' for grammar"),
        (grammar_masks, CONSTRAINED, {}, "driver 'choice' for grammar"),
        (grammar_masks, CONSTRAINED, NGRAM, "driver 'choice' for grammar"),
        (grammar_masks, STOPPED, {}, "driver 'choice' for grammar"),
        (grammar_rollback, CONSTRAINED, NGRAM, "driver 'choice' for grammar"),
        (grammar_forced, CONSTRAINED, {"enable_jump_forward": True}, "driver 'choice' for grammar"),
        (processor_enter, BIASED, {}, "driver 'logit_bias' for logits_processor"),
        (processor_apply, BIASED, {}, "driver 'logit_bias' for logits_processor"),
        (processor_apply, BIASED, NGRAM, "driver 'logit_bias' for logits_processor"),
        (drafter_enter, {}, NGRAM, "driver 'ngram' for drafter"),
        (tokenizer_stream, {}, {}, "driver 'hf' for tokenizer"),
        (push, {}, {}, "driver 'fcfs' for scheduling_policy"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_it_ends_alone(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[Patch], None], params: Any, settings: Any, names: str
) -> None:
    plant(monkeypatch.setattr)
    common = {"max_num_seqs": 4, "block_size": 4, "num_kv_pages": 400}
    with LLM("tiny", dtype="float64", grammar="choice", **common, **settings) as llm:
        for turn in range(2):
            ends = run(llm, PROMPTS, params)
            error = ends.pop("bad").error
            assert isinstance(error, ContractError) and "engine-reference" in str(error) and "went off" in str(error)
            assert names in str(error), turn
            assert all(end.error is None for end in ends.values())
            alone = run(llm, {name: prompt for name, prompt in PROMPTS.items() if name != "bad"}, params)
            for name, end in ends.items():
                assert end.outputs[0].token_ids == alone[name].outputs[0].token_ids


def run(llm: LLM, prompts: dict[str, list[int]], params: dict[str, dict[str, Any]]) -> dict[str, Any]:
    engine = llm.llm_engine
    for name, prompt in prompts.items():
        more = {"temperature": 0, "seed": 0, "max_tokens": 12, **params.get(name, {})}
        engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**more))
    ends: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ends[output.request_id] = output
    return ends


@pytest.mark.parametrize(("method", "asked"), [("swap_out", "swap request"), ("swap_in", "swap back request")])
def test_a_connector_over_a_request(monkeypatch: pytest.MonkeyPatch, method: str, asked: str) -> None:
    """The first that it is asked about."""
    bad: list[str] = []

    def is_bad(self: HostScheduler, request_id: str, *args: np.ndarray) -> bool:
        bad.append(request_id)
        return request_id == bad[0]

    settings = {"num_kv_pages": 14, "swap_space": "1MiB", "preemption_mode": "swap"}
    with LLM("tiny", dtype="float64", max_num_seqs=4, block_size=4, **settings) as llm:
        prompts = {f"r{i}": [7 * i + j for j in range(8)] for i in range(4)}
        params = {name: {"max_tokens": 20, "ignore_eos": True} for name in prompts}
        quiet = run(llm, prompts, params)
        over(method, monkeypatch.setattr, HostScheduler, method, is_bad)
        ends = run(llm, prompts, params)
        assert bad, "nobody was swapped"
        error = ends.pop(bad[0]).error
        assert isinstance(error, ContractError)
        assert "driver 'host' for kv_connector, of engine-reference" in str(error) and asked in str(error)
        for name, end in ends.items():
            assert end.error is None and end.outputs[0].token_ids == quiet[name].outputs[0].token_ids


def test_a_drafter_that_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter_alone(monkeypatch.setattr)
    with LLM("tiny", dtype="float64", max_num_seqs=4, block_size=4, num_kv_pages=400, **NGRAM) as llm:
        error = run(llm, {"bad": PROMPTS["bad"]}, {})["bad"].error
        assert isinstance(error, ContractError) and "driver 'ngram' for drafter" in str(error)


def test_a_drafter_that_does_not_let_go_costs_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM("tiny", dtype="float64", max_num_seqs=4, block_size=4, num_kv_pages=400, **NGRAM) as llm:
        quiet = run(llm, PROMPTS, {})
        error = ContractError("let go", "leave went off")  # of Engine's own, too, it is told
        monkeypatch.setattr(NgramDrafterBody, "leave", lambda *_: (_ for _ in ()).throw(error))
        for _ in range(2):  # the first run's are let go in the second
            ends = run(llm, PROMPTS, {})
            for name, end in ends.items():
                assert end.error is None and end.outputs[0].token_ids == quiet[name].outputs[0].token_ids
        assert "drafter 'ngram' could not let slot" in caplog.text and "leave went off" in caplog.text


def test_what_cannot_be_told_apart_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter_alone(monkeypatch.setattr)
    with LLM("tiny", dtype="float64", max_num_seqs=4, block_size=4, num_kv_pages=400, **NGRAM) as llm:
        ends = run(llm, PROMPTS, {})
        assert len(ends) == len(PROMPTS)
        for end in ends.values():
            assert isinstance(end.error, EngineDeadError) and "driver 'ngram' for drafter" in str(end.error)
