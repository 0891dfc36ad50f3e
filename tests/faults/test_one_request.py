"""A driver that raises over one request costs that request, with an error that names the driver; others go on.

The table in docs/plugins/driver.md says for which drivers that holds. Each of its rows is planted here, or in a test
that `ELSEWHERE` names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine import LLM, SamplingParams
from engine.types.errors import ContractError, EngineDeadError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_connectors.store_scheduler import StoreScheduler
from engine_kit.kv_canary import CanaryScheduler
from engine_reference.attention_torch.attention import TorchAttentionBody
from engine_reference.connector_host.scheduler_half import HostScheduler
from engine_reference.drafter_ngram.card import NgramDrafter
from engine_reference.drafter_ngram.ngram import NgramDrafterBody
from engine_reference.evictor_lru import LRU
from engine_reference.executor_inline import Inline
from engine_reference.grammar_choice import ChoiceBody, ChoiceMatcher
from engine_reference.logits_processors.processors import LogitBiasBody
from engine_reference.models.llama import LlamaModel
from engine_reference.ops_torch.ops import TorchOpsBody
from engine_reference.platform_host.platform import HostPlatformBody
from engine_reference.policy_fcfs import FCFS
from engine_reference.tokenizer_hf.tokenizer import HFTokenizerBody

Patch = Callable[..., None]
PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "driver.md"

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


def grammar_finished(patch: Patch) -> None:
    marked, real = mark(patch), ChoiceMatcher.finished.fget
    assert real is not None

    def finished(self: ChoiceMatcher) -> bool:
        if self._path and marked(self):  # at its beginning it is asked by who compiles
            raise Bomb("finished went off")
        return bool(real(self))

    patch(ChoiceMatcher, "finished", property(finished))


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


def push_front(patch: Patch) -> None:
    over("push_front", patch, FCFS, "push_front", lambda self, request: request.request_id.startswith("bad"))


class Fault(NamedTuple):
    """A row of the page's table, planted.

    Args:
        point, call: as the table has them.
        plant: puts it into a driver.
        driver: which.
        params: of requests, by name.
        settings: of the engine.
    """

    point: str
    call: str
    plant: Callable[[Patch], None]
    driver: str
    params: dict[str, dict[str, Any]]
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.plant.__name__}-{'-'.join(map(str, self.settings))}"


SCARCE = {"num_kv_pages": 14}
LONG: dict[str, dict[str, Any]] = {name: {"max_tokens": 20, "ignore_eos": True} for name in PROMPTS}

ALONE = [
    Fault("grammar", "compile", grammar_compile, "choice", CONSTRAINED, {}),
    Fault("grammar", "accept", grammar_accept, "choice", CONSTRAINED, {}),
    Fault("grammar", "fill_masks", grammar_masks, "choice", CONSTRAINED, {}),
    Fault("grammar", "fill_masks", grammar_masks, "choice", CONSTRAINED, NGRAM),
    Fault("grammar", "fill_masks", grammar_masks, "choice", STOPPED, {}),
    Fault("grammar", "rollback", grammar_rollback, "choice", CONSTRAINED, NGRAM),
    Fault("grammar", "forced_bytes", grammar_forced, "choice", CONSTRAINED, {"enable_jump_forward": True}),
    Fault("grammar", "finished", grammar_finished, "choice", CONSTRAINED, {}),
    Fault("logits_processor", "enter", processor_enter, "logit_bias", BIASED, {}),
    Fault("logits_processor", "apply", processor_apply, "logit_bias", BIASED, {}),
    Fault("logits_processor", "apply", processor_apply, "logit_bias", BIASED, NGRAM),
    Fault("drafter", "enter", drafter_enter, "ngram", {}, NGRAM),
    Fault("tokenizer", "decoding what was generated", tokenizer_stream, "hf", {}, {}),
    Fault("scheduling_policy", "push", push, "fcfs", {}, {}),
    Fault("scheduling_policy", "push_front", push_front, "fcfs", LONG, SCARCE),
]
"""What costs the request over which it is raised."""


@pytest.mark.parametrize("fault", ALONE, ids=str)
def test_it_ends_alone(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    fault.plant(monkeypatch.setattr)
    common = {"max_num_seqs": 4, "block_size": 4, "num_kv_pages": 400}
    with LLM("tiny", dtype="float64", grammar="choice", **{**common, **fault.settings}) as llm:
        for turn in range(2):
            ends = run(llm, PROMPTS, fault.params)
            error = ends.pop("bad").error
            assert isinstance(error, ContractError) and "engine-reference" in str(error) and "went off" in str(error)
            assert f"driver '{fault.driver}' for {fault.point}" in str(error), turn
            assert all(end.error is None for end in ends.values())
            alone = run(llm, {name: prompt for name, prompt in PROMPTS.items() if name != "bad"}, fault.params)
            for name, end in ends.items():
                assert end.outputs[0].token_ids == alone[name].outputs[0].token_ids


def run(
    llm: LLM,
    prompts: dict[str, list[int]],
    params: dict[str, dict[str, Any]],
    after_each: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """All requests' last outputs. after_each: is called after each step."""
    engine = llm.llm_engine
    for name, prompt in prompts.items():
        more = {"temperature": 0, "seed": 0, "max_tokens": 12, **params.get(name, {})}
        engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**more))
    ends: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ends[output.request_id] = output
        after_each()
    return ends


def is_first(told: list[str]) -> Callable[..., bool]:
    """Tells the request that a connector is asked about first; `told` names all that it was asked about."""

    def is_bad(self: Any, request: Any, *args: Any) -> bool:
        told.append(request if isinstance(request, str) else request.request_id)
        return told[-1] == told[0]

    return is_bad


SWAPS = {"num_kv_pages": 14, "swap_space": "1MiB", "preemption_mode": "swap"}
QUEUE = {f"r{i}": [7 * i + j for j in range(8)] for i in range(4)}
QUEUED: dict[str, dict[str, Any]] = {name: {"max_tokens": 20, "ignore_eos": True} for name in QUEUE}


@pytest.mark.parametrize(("method", "asked"), [("swap_out", "swap request"), ("swap_in", "swap back request")])
def test_a_connector_over_a_request(monkeypatch: pytest.MonkeyPatch, method: str, asked: str) -> None:
    """The first that it is asked about."""
    bad: list[str] = []
    with LLM("tiny", dtype="float64", max_num_seqs=4, block_size=4, **SWAPS) as llm:
        quiet = run(llm, QUEUE, QUEUED)
        over(method, monkeypatch.setattr, HostScheduler, method, is_first(bad))
        ends = run(llm, QUEUE, QUEUED)
        assert bad, "nobody was swapped"
        error = ends.pop(bad[0]).error
        assert isinstance(error, ContractError)
        assert "driver 'host' for kv_connector, of engine-reference" in str(error) and asked in str(error)
        assert_as_quiet(ends, quiet)


def test_a_tier_that_does_not_forget_costs_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that waits swapped is aborted."""
    swapped: list[str] = []
    with LLM("tiny", dtype="float64", max_num_seqs=4, block_size=4, **SWAPS) as llm:
        quiet = run(llm, QUEUE, QUEUED)
        monkeypatch.setattr(HostScheduler, "swap_out", noting(HostScheduler.swap_out, swapped))
        over("forget", monkeypatch.setattr, HostScheduler, "forget", lambda self, name: name in swapped[:1])
        ends = run(llm, QUEUE, QUEUED, lambda: llm.llm_engine.abort_request(swapped[:1]) if swapped else None)
        assert ends.keys() == QUEUE.keys() - {swapped[0]}
        assert "forget went off" in caplog.text
        assert_as_quiet(ends, quiet)


@pytest.mark.parametrize("method", ["lookup", "allocated", "computed"])
def test_a_store_over_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str) -> None:
    """The first that it is asked about; what others asked of the store, they get."""
    bad: list[str] = []
    with with_files(tmp_path) as llm:
        quiet = run(llm, PROMPTS, {})
        for turn in range(2):
            llm.llm_engine.client.call("reset_prefix_cache")
            bad.clear()
            with monkeypatch.context() as here:
                over(method, here.setattr, StoreScheduler, method, is_first(bad))
                ends = run(llm, PROMPTS, {})
            error = ends.pop(bad[0]).error
            assert isinstance(error, ContractError) and f"{method} went off" in str(error), turn
            assert "driver 'file' for kv_connector, of engine-connectors" in str(error)
            assert_as_quiet(ends, quiet)


@pytest.mark.parametrize("method", ["filled", "entered"])
def test_who_watches_pages_over_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str) -> None:
    bad: list[str] = []
    with with_files(tmp_path, kv_canary=True) as llm:
        quiet = run(llm, PROMPTS, {})
        llm.llm_engine.client.call("reset_prefix_cache")
        over(method, monkeypatch.setattr, CanaryScheduler, method, is_first(bad))
        ends = run(llm, PROMPTS, {})
        error = ends.pop(bad[0]).error
        assert isinstance(error, ContractError) and f"{method} went off" in str(error) and "kv_connector" in str(error)
        assert_as_quiet(ends, quiet)


@pytest.mark.parametrize("method", ["finished", "aborted"])
def test_a_store_over_a_request_that_has_ended_costs_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    told: list[str] = []
    with with_files(tmp_path) as llm:
        quiet = run(llm, PROMPTS, {})
        over(method, monkeypatch.setattr, StoreScheduler, method, is_first(told))
        ends = run(llm, PROMPTS, {}, lambda: llm.llm_engine.abort_request(["bad"]) if method == "aborted" else None)
        assert ends.keys() == PROMPTS.keys() - ({"bad"} if method == "aborted" else set())
        assert told and errors_of(llm, "file") == 1
        assert_as_quiet(ends, quiet)


def with_files(folder: Path, **settings: Any) -> LLM:
    common = {"max_num_seqs": 4, "block_size": 4, "num_kv_pages": 400}
    options = {"kv_connector": {"path": str(folder)}}
    return LLM("tiny", dtype="float64", kv_connector="file", options=options, **common, **settings)


def noting(method: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def noted(self: Any, name: str, *args: Any) -> Any:
        names.append(name)
        return method(self, name, *args)

    return noted


def errors_of(llm: LLM, connector: str) -> int:
    return sum(n for name, of, n in llm.llm_engine.stats().kv_connectors if (name, of) == (connector, "errors"))


def assert_as_quiet(ends: dict[str, Any], quiet: dict[str, Any]) -> None:
    assert ends
    for name, end in ends.items():
        assert end.error is None and end.outputs[0].token_ids == quiet[name].outputs[0].token_ids


def test_a_tokenizer_that_cannot_encode_what_is_forced_costs_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_num_seqs": 4, "block_size": 4, "num_kv_pages": 400, "enable_jump_forward": True}
    with LLM("tiny", dtype="float64", grammar="choice", **settings) as llm:
        over("encode", monkeypatch.setattr, HFTokenizerBody, "encode", lambda self, *args: True)
        ends = run(llm, PROMPTS, CONSTRAINED)
        assert "cannot encode what a constraint forces" in caplog.text and "encode went off" in caplog.text
        monkeypatch.undo()
        assert_as_quiet(ends, run(llm, PROMPTS, CONSTRAINED))


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


class Whole(NamedTuple):
    """What ends the engine: whose method, and the engine's settings."""

    point: str
    call: str
    owner: type
    method: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.point}-{self.method}"


EVERYBODYS = [
    Whole("drafter", "propose", NgramDrafterBody, "propose", NGRAM),
    Whole("drafter", "what is not named above", NgramDrafterBody, "observe", NGRAM),
    Whole("model", "any", LlamaModel, "forward", {}),
    Whole("attention", "any", TorchAttentionBody, "forward", {"attention": "torch"}),
    Whole("ops", "any", TorchOpsBody, "rms_norm", {"ops": "torch"}),
    Whole("platform", "any", HostPlatformBody, "to_host", {"platform": "host"}),
    Whole("executor", "any", Inline, "execute", {}),
    Whole("evictor", "any", LRU, "on_commit", {"evictor": "lru"}),
    Whole("kv_connector", "what is not named above", HostScheduler, "plan_section", {"swap_space": "1MiB"}),
    Whole("scheduling_policy", "what is not named above", FCFS, "peek", {}),
]


@pytest.mark.parametrize("fault", EVERYBODYS, ids=str)
def test_what_cannot_be_told_apart_ends_the_engine(monkeypatch: pytest.MonkeyPatch, fault: Whole) -> None:
    monkeypatch.setattr(NgramDrafter, "needs", frozenset({"hidden"} if fault.method == "observe" else ()))
    common = {"max_num_seqs": 4, "block_size": 4, "num_kv_pages": 400}
    with LLM("tiny", dtype="float64", **{**common, **fault.settings}) as llm:
        run(llm, PROMPTS, {})
        over(fault.method, monkeypatch.setattr, fault.owner, fault.method, lambda *_: True)
        ends = run(llm, PROMPTS, {})
        assert ends.keys() == PROMPTS.keys()
        words = "driver 'ngram' for drafter" if fault.point == "drafter" else "Bomb: .* went off"
        for end in ends.values():
            assert isinstance(end.error, EngineDeadError) and re.search(words, str(end.error))


HERE = {
    ("kv_connector", "lookup"): test_a_store_over_a_request,
    ("kv_connector", "allocated"): test_a_store_over_a_request,
    ("kv_connector", "computed"): test_a_store_over_a_request,
    ("kv_connector", "swap_out"): test_a_connector_over_a_request,
    ("kv_connector", "swap_in"): test_a_connector_over_a_request,
    ("kv_connector", "filled"): test_who_watches_pages_over_a_request,
    ("kv_connector", "entered"): test_who_watches_pages_over_a_request,
    ("kv_connector", "finished"): test_a_store_over_a_request_that_has_ended_costs_nobody,
    ("kv_connector", "aborted"): test_a_store_over_a_request_that_has_ended_costs_nobody,
    ("kv_connector", "forget"): test_a_tier_that_does_not_forget_costs_nobody,
    ("drafter", "leave"): test_a_drafter_that_does_not_let_go_costs_nobody,
    ("tokenizer", "encode"): test_a_tokenizer_that_cannot_encode_what_is_forced_costs_nobody,
}
ELSEWHERE = {
    ("kv_connector", "reused"): "plugins/blend/tests/test_beside.py"
    "::test_who_raises_over_what_is_reused_ends_that_request",
    ("hooks that decide", "any"): "tests/hooks/test_drives.py::test_deciding_hooks_fail_closed",
    ("router", "any"): "plugins/parallel/tests/client/test_client.py"
    "::test_a_router_that_errs_is_named_and_ends_the_request_alone",
    ("nodes", "any"): "plugins/nodes/tests/test_two_machines.py::test_a_machine_is_lost_and_comes_back",
    ("communicator", "any"): "tests/faults/test_worker.py::test_a_communicator_that_raises",
}


def test_each_row_of_the_page_is_planted() -> None:
    """And nothing is planted that the page does not have."""
    table = PAGE.read_text(encoding="utf-8").partition("| point | raised in |")[2].partition("\n\n")[0]
    rows = set[tuple[str, str]]()
    for line in table.splitlines()[2:]:
        points, calls, _ = (re.findall(r"`(\w+)`", cell) or [cell.strip()] for cell in line.strip("|").split(" | "))
        rows |= set(product(points, calls))
    planted = {(fault.point, fault.call) for fault in [*ALONE, *EVERYBODYS]} | HERE.keys() | ELSEWHERE.keys()
    assert rows == planted
    for where in ELSEWHERE.values():
        path, _, name = where.partition("::")
        assert f"def {name}(" in (PAGE.parents[2] / path).read_text(encoding="utf-8")
