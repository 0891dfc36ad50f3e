"""Text through the filters of hook plugins: the same at every cut, streamed or not, and whole at the end."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_state import OutputKind
from engine.types.errors import HookFailedError
from engine.types.hooks import RequestSummary
from engine.types.params import SamplingParams

WORD = "ab"


class Hooks:
    """A relay in which only these two hooks are heard."""

    admit = rewrite_prompt = request_received = None

    def __init__(self, make_filter: Any = None) -> None:
        self.output_filter = make_filter
        self.finished: list[RequestSummary] = []

    def request_finished(self, summary: RequestSummary) -> None:
        self.finished.append(summary)


class Replace:
    """Writes <> for the word; holds back what might begin it."""

    def __init__(self) -> None:
        self.held = ""
        self.ended = False

    def __call__(self, text: str, last: bool) -> str:
        assert not self.ended and (text or last)
        self.ended = last
        text = (self.held + text).replace(WORD, "<>")
        self.held = WORD[0] if not last and text.endswith(WORD[0]) else ""
        return text.removesuffix(self.held) if self.held else text


def outputs_of(doubles: ModuleType, hooks: Hooks) -> tuple[InputProcessor, OutputProcessor]:
    tokenizer = doubles.CharTokenizer()
    inputs = InputProcessor(tokenizer, doubles.description(), 64, 0, hooks)  # type: ignore[arg-type]
    return inputs, OutputProcessor(tokenizer, hooks, "m")  # type: ignore[arg-type]


def play(doubles: ModuleType, kind: OutputKind, pieces: list[str], finish: str, hooks: Hooks, **params: Any) -> str:
    inputs, outputs = outputs_of(doubles, hooks)
    outputs.add(inputs.process("r", "hi", SamplingParams(max_tokens=None, **params)), kind)
    shown = ""
    for i, piece in enumerate(pieces):
        news = doubles.news("r", piece, finish if i == len(pieces) - 1 else None)
        for output in outputs.process([news], doubles.Client()):
            text = output.outputs[0].text
            shown = shown + text if kind is OutputKind.DELTA else text
    assert len(outputs) == 0
    return shown


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text("abc", max_size=4), min_size=1, max_size=6), st.sampled_from(OutputKind))
def test_every_cut_and_every_kind_show_the_same(doubles: ModuleType, pieces: list[str], kind: OutputKind) -> None:
    hooks = Hooks(lambda request, index: Replace())
    assert play(doubles, kind, pieces, "length", hooks) == "".join(pieces).replace(WORD, "<>")
    [summary] = hooks.finished
    assert summary.output_tokens == len("".join(pieces)) and summary.finish_reason == "length"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text("abc", max_size=3), min_size=1, max_size=6), st.sampled_from(OutputKind))
def test_filters_come_after_stop_strings(doubles: ModuleType, pieces: list[str], kind: OutputKind) -> None:
    text = "".join(pieces)
    until = text.partition("cc")[0] if "cc" in text else text
    hooks = Hooks(lambda request, index: Replace())
    assert play(doubles, kind, pieces, "length", hooks, stop="cc") == until.replace(WORD, "<>")


@pytest.mark.parametrize("kind", OutputKind)
def test_a_filter_that_fails_ends_the_sequence_here_and_in_the_core(doubles: ModuleType, kind: OutputKind) -> None:
    error = HookFailedError("a", "b", "c")

    def fails(text: str, last: bool) -> str:
        if "b" in text:
            raise error
        return text

    hooks = Hooks(lambda request, index: fails)
    inputs, outputs = outputs_of(doubles, hooks)
    outputs.add(inputs.process("r", "hi", SamplingParams(max_tokens=None)), kind)
    outputs.process([doubles.news("r", "a")], client := doubles.Client())
    [output] = outputs.process([doubles.news("r", "b")], client)
    assert client.aborted == ["r"] and outputs.num_sequences == 0
    assert output.finished and output.error is error and output.outputs[0].finish_reason == "error"
    assert "b" not in output.outputs[0].text
    [summary] = hooks.finished
    assert (summary.finish_reason, summary.error_code) == ("error", "hook_failed")


def test_a_request_of_no_tokens_has_no_filter(doubles: ModuleType) -> None:
    """Which would wait for its end."""
    hooks = Hooks(lambda request, index: pytest.fail("it has no text to filter"))
    inputs, outputs = outputs_of(doubles, hooks)
    outputs.add(inputs.process("r", "hi", SamplingParams(max_tokens=0)), OutputKind.FINAL)
    [output] = outputs.process([doubles.news("r", "a", "length")], doubles.Client())
    assert output.finished and output.outputs[0].text == "" and hooks.finished[0].finish_reason == "length"


def test_a_filter_that_cannot_be_made_refuses_the_request(doubles: ModuleType) -> None:
    def refuse(request: object, index: int) -> None:
        raise HookFailedError("a")

    inputs, outputs = outputs_of(doubles, Hooks(refuse))
    with pytest.raises(HookFailedError):
        outputs.add(inputs.process("r", "hi", SamplingParams(max_tokens=None)))
    assert len(outputs) == 0 and outputs.num_sequences == 0


def test_a_summary_tells_what_was_waited_for(doubles: ModuleType) -> None:
    hooks = Hooks()
    inputs, outputs = outputs_of(doubles, hooks)
    arrived = inputs.clock.now() - 5.0
    outputs.add(inputs.process("r", "hi", SamplingParams(max_tokens=None), arrived))
    outputs.process([doubles.news("r", "a", queue_time=1.0, prefill_time=2.0, num_cached_tokens=1)], doubles.Client())
    outputs.process([doubles.news("r", "b", "stop")], doubles.Client())
    [summary] = hooks.finished
    assert (summary.model, summary.request_id, summary.index) == ("m", "r", 0)
    assert (summary.queue_seconds, summary.prefill_seconds, summary.cached_tokens) == (1.0, 2.0, 1)
    assert summary.arrival_time == arrived and 5.0 <= summary.total_seconds < 6.0
    assert summary.first_token_seconds is not None
    assert 5.0 <= summary.first_token_seconds <= summary.total_seconds - summary.decode_seconds
    assert 0 <= summary.decode_seconds < 1.0 and summary.output_tokens == 2
    assert summary.prompt_tokens == 3 and summary.http is None


def test_a_request_that_got_nothing(doubles: ModuleType) -> None:
    hooks = Hooks()
    inputs, outputs = outputs_of(doubles, hooks)
    outputs.add(inputs.process("r", "hi", SamplingParams(max_tokens=None, n=2)))
    assert outputs.abort(["r"]) == ["r#0", "r#1"]
    told = [(s.index, s.finish_reason, s.queue_seconds, s.first_token_seconds, s.output_tokens) for s in hooks.finished]
    assert told == [(0, "abort", None, None, 0), (1, "abort", None, None, 0)]
