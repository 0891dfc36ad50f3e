"""What the user reads, from what a core sends."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_state import OutputKind
from engine.types.errors import InvalidRequestError, KVCacheTooSmallError
from engine.types.outputs import CompletionOutput, CoreOutput, RequestOutput
from engine.types.params import SamplingParams


class Bench:
    """An input and an output processor around a core that the test plays."""

    def __init__(self, doubles: ModuleType) -> None:
        self.doubles = doubles
        tokenizer = doubles.CharTokenizer()
        self.inputs = InputProcessor(tokenizer, doubles.description(), 64)
        self.outputs = OutputProcessor(tokenizer)

    def add(self, request_id: str = "r", kind: OutputKind = OutputKind.CUMULATIVE, **params: Any) -> None:
        params.setdefault("max_tokens", None)
        self.outputs.add(self.inputs.process(request_id, "hi", SamplingParams(**params)), kind)

    def take(self, *news: CoreOutput) -> RequestOutput | None:
        client = self.doubles.Client()
        outputs = self.outputs.process(news, client)
        self.aborts = client.aborted
        assert len(outputs) <= 1
        return outputs[0] if outputs else None

    def one(self, text: Any = "", finish: str | None = None, request_id: str = "r", **fields: Any) -> CompletionOutput:
        output = self.take(self.doubles.news(request_id, text, finish, **fields))
        assert output is not None
        (completion,) = output.outputs
        return completion


@pytest.fixture
def bench(doubles: ModuleType) -> Bench:
    return Bench(doubles)


def test_text_grows(bench: Bench) -> None:
    bench.add()
    first = bench.one("ab")
    second = bench.one("c")
    assert (first.text, second.text) == ("ab", "abc")
    assert (first.token_ids, second.token_ids) == ([97, 98], [97, 98, 99])
    assert first.finish_reason is None and len(bench.outputs) == 1
    last = bench.one("d", "length")
    assert (last.text, last.finish_reason, last.stop_reason) == ("abcd", "length", None)
    assert len(bench.outputs) == 0
    assert bench.take(bench.doubles.news("r", "zz")) is None  # late news of an ended request


def test_delta_and_final(bench: Bench) -> None:
    bench.add("d", OutputKind.DELTA, logprobs=0)
    bench.add("f", OutputKind.FINAL)
    lp = bench.doubles.logprobs
    assert bench.one("ab", request_id="d", new_logprobs=lp(-1, -2)).text == "ab"
    delta = bench.one("c", request_id="d", new_logprobs=lp(-3))
    assert (delta.text, delta.token_ids, len(delta.logprobs or [])) == ("c", [99], 1)
    assert delta.cumulative_logprob == -6
    assert bench.take(bench.doubles.news("f", "ab")) is None
    final = bench.one("c", "length", request_id="f")
    assert (final.text, final.token_ids) == ("abc", [97, 98, 99])


def test_the_last_token_of_a_stop_is_kept_but_not_shown(bench: Bench) -> None:
    bench.add(stop_token_ids=[46])
    done = bench.one("ab.", "stop", stop_reason=46)
    assert (done.text, done.token_ids, done.finish_reason, done.stop_reason) == ("ab", [97, 98, 46], "stop", 46)
    bench.add(stop_token_ids=[46], include_stop_str_in_output=True)
    assert bench.one("ab.", "stop", stop_reason=46).text == "ab."
    bench.add()
    assert bench.one([97, 0], "stop").text == "a"


def test_half_characters_wait(bench: Bench) -> None:
    bench.add()
    assert bench.one("aä").text == "a"
    assert bench.one("b").text == "aÄb"
    assert bench.one("ä").text == "aÄb"
    assert bench.one("", "length").text == "aÄb�"


def test_stop_string_across_tokens(bench: Bench) -> None:
    bench.add(stop=["END", "x"])
    assert bench.one("aE").text == "a"
    assert bench.one("N").text == "a"
    assert bench.one("Q").text == "aENQ"  # it was none
    done = bench.one("bENDcd")
    assert (done.text, done.finish_reason, done.stop_reason) == ("aENQb", "stop", "END")
    assert done.token_ids == [ord(c) for c in "aENQbEND"]  # what came after it in the same step is dropped
    assert bench.aborts == ["r"]
    assert len(bench.outputs) == 0


def test_stop_string_included(bench: Bench) -> None:
    bench.add(stop=["END"], include_stop_str_in_output=True)
    bench.one("aEN")
    assert bench.one("Dz").text == "aEND"


def test_stop_string_and_end_in_one_step(bench: Bench) -> None:
    bench.add(stop=["END"], kind=OutputKind.DELTA)
    done = bench.one("aEND", "length")
    assert (done.text, done.finish_reason, done.stop_reason) == ("a", "stop", "END")
    assert bench.aborts == []  # the core has ended it itself


def test_what_is_held_back_is_shown_at_the_end(bench: Bench) -> None:
    bench.add(stop=["END"])
    assert bench.one("aEN").text == "a"
    assert bench.one([0], "stop").text == "aEN"


def test_stop_string_that_the_last_half_character_completes(bench: Bench) -> None:
    bench.add(stop=["�"])
    done = bench.one("aä", "length")
    assert (done.text, done.finish_reason, done.stop_reason) == ("a", "stop", "�")


def test_min_tokens_holds_for_stop_strings(bench: Bench) -> None:
    bench.add(stop=["x"], min_tokens=3)
    assert bench.one("axb").finish_reason is None
    done = bench.one("x")
    assert (done.text, done.stop_reason) == ("axb", "x")
    bench.add(stop=["x"], min_tokens=3)
    assert bench.one("abx").text == "ab"  # the third token may end it


def test_logprobs(bench: Bench) -> None:
    bench.add(logprobs=2, stop=["c"])
    done = bench.one("Zbcd", new_logprobs=bench.doubles.logprobs(-1.0, -0.2, -3.0, -4.0))
    assert done.cumulative_logprob == pytest.approx(-4.2)
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids) == 3
    first = done.logprobs[0]
    assert list(first) == [ord("Z"), 65, 66]
    assert first[ord("Z")] == (-1.0, 2, "Z")
    assert first[65] == (-0.1, 1, "A") and first[66] == (-0.2, 2, "B")


def test_the_drawn_token_stands_once(bench: Bench) -> None:
    bench.add(logprobs=2)
    (position,) = bench.one("B", new_logprobs=bench.doubles.logprobs(-0.2)).logprobs or []
    assert position == {66: (-0.2, 2, "B"), 65: (-0.1, 1, "A")}
    assert bench.one("", "abort").cumulative_logprob == -0.2


def test_special_tokens_and_no_text(bench: Bench) -> None:
    bench.add()
    assert bench.one([97, 901], "length").text == "a"
    bench.add(skip_special_tokens=False)
    assert bench.one([97, 901], "length").text == "a" + chr(901)
    bench.add(detokenize=False)
    done = bench.one("ab", "length")
    assert (done.text, done.token_ids) == ("", [97, 98])


def test_children_become_one_output(bench: Bench) -> None:
    bench.add(n=3, stop=["x"])
    news = bench.doubles.news
    output = bench.take(news("r#1", "b", num_cached_tokens=2), news("r#0", "a"))
    assert output is not None and [c.text for c in output.outputs] == ["a", "b", ""]
    assert not output.finished
    output = bench.take(news("r#1", "x"), news("r#0", "", "length", num_cached_tokens=1))
    assert output is not None and bench.aborts == ["r#1"]
    assert [c.finish_reason for c in output.outputs] == ["length", "stop", None]
    assert not output.finished and len(bench.outputs) == 1
    output = bench.take(news("r#2", "c", "length"))
    assert output is not None and output.finished
    assert [c.text for c in output.outputs] == ["a", "b", "c"]
    assert output.num_cached_tokens == 1
    assert len(bench.outputs) == 0


def test_children_delta(bench: Bench) -> None:
    bench.add(kind=OutputKind.DELTA, n=3)
    news = bench.doubles.news
    output = bench.take(news("r#2", "c"), news("r#0", "a"))
    assert output is not None and [(c.index, c.text) for c in output.outputs] == [(0, "a"), (2, "c")]


def test_errors_are_typed(bench: Bench) -> None:
    bench.add(n=2, kind=OutputKind.FINAL)
    error = ("kv_cache_too_small", "a", "b", "c")
    assert bench.take(bench.doubles.news("r#0", "", "error", error=error)) is None
    output = bench.take(bench.doubles.news("r#1", "z", "length"))
    assert output is not None
    assert isinstance(output.error, KVCacheTooSmallError) and str(output.error) == "a; b; c"
    assert [c.finish_reason for c in output.outputs] == ["error", "length"]
    bench.add()
    done = bench.take(bench.doubles.news("r", "", "error"))
    assert done is not None and done.error is not None and "r" in str(done.error)


def test_ids_are_unique(bench: Bench) -> None:
    bench.add("a", n=2)
    for other in ("a", "a#0"):
        with pytest.raises(InvalidRequestError, match="has that id"):
            bench.add(other)
    bench.add("b#1")
    with pytest.raises(InvalidRequestError, match="b#1"):
        bench.add("b", n=2)
    assert bench.outputs.request_ids() == ["a", "b#1"]


def test_abort(bench: Bench) -> None:
    bench.add("a", n=2)
    bench.add("b")
    bench.take(bench.doubles.news("a#0", "x", "length"))
    assert bench.outputs.abort(["a", "zz"]) == ["a#1"]
    assert bench.outputs.request_ids() == ["b"]
    assert bench.take(bench.doubles.news("a#1", "x")) is None
    bench.add("a")


def test_outputs_given_out_do_not_change(bench: Bench) -> None:
    bench.add(logprobs=0)
    first = bench.one("a", new_logprobs=bench.doubles.logprobs(-1))
    bench.one("b", new_logprobs=bench.doubles.logprobs(-1))
    assert (first.text, first.token_ids, len(first.logprobs or [])) == ("a", [97], 1)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("abEND", max_size=30),
    cuts=st.lists(st.integers(1, 4), max_size=30),
    stops=st.lists(st.sampled_from(["END", "ab", "bE", "DD", "aaa"]), unique=True, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_the_cut_into_steps_does_not_matter(
    doubles: ModuleType, text: str, cuts: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    """The end is the same for every cut; deltas add up to it; no text that was shown is taken back."""
    ends = []
    for sizes in (cuts, [1] * len(text), [len(text)]):
        bench = Bench(doubles)
        params: dict[str, Any] = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
        bench.add("c", **params)
        bench.add("d", OutputKind.DELTA, **params)
        place, deltas, shown, end = 0, "", "", None
        for size in [*sizes, len(text) + 1]:
            part = text[place : place + size]
            place += size
            finish = "length" if place >= len(text) else None
            end = bench.one(part, finish, request_id="c")
            deltas += bench.one(part, finish, request_id="d").text
            assert end.text.startswith(shown) and deltas == end.text
            shown = end.text
            if end.finished:
                break
        assert end is not None and end.finished
        ends.append((end.text, end.token_ids, end.finish_reason, end.stop_reason))
        if end.finish_reason == "length" and not min_tokens:
            assert not any(stop in end.text for stop in stops)
    assert ends[0] == ends[1] == ends[2]


# -- best_of, prompt_logprobs ----------------------------------------------------------------------------------------
def scored(bench: Bench, index: int, text: str, *values: float) -> CoreOutput:
    return bench.doubles.news(f"r#{index}", text, "length", new_logprobs=bench.doubles.logprobs(*values))


def test_the_best_come_first_and_the_others_are_counted(bench: Bench) -> None:
    bench.add(n=2, best_of=4)
    assert bench.take(bench.doubles.news("r#0", "a", new_logprobs=bench.doubles.logprobs(-1.0))) is None
    news = [
        bench.doubles.news("r#0", "b", "length", new_logprobs=bench.doubles.logprobs(-2.0)),
        scored(bench, 1, "cd", -0.5, -0.75),
        scored(bench, 2, "efg", -4.0, -1.0, -1.0),
    ]
    assert bench.take(*news) is None, "not before all have ended"
    output = bench.take(scored(bench, 3, "h", -3.0))
    assert output is not None and output.finished
    assert [(c.index, c.text, c.cumulative_logprob) for c in output.outputs] == [(0, "cd", -1.25), (1, "ab", -3.0)]
    assert all(c.logprobs is None for c in output.outputs), "they were not asked for"
    assert output.num_discarded_tokens == 4


def test_best_of_keeps_logprobs_that_were_asked_for_and_puts_errors_last(bench: Bench) -> None:
    bench.add(best_of=2, logprobs=2)
    error = ("kv_cache_too_small", "a", "b", "c")
    output = bench.take(bench.doubles.news("r#0", "", "error", error=error), scored(bench, 1, "x", -9.0))
    assert output is not None
    (completion,) = output.outputs
    assert completion.text == "x" and completion.logprobs is not None and 65 in completion.logprobs[0]
    assert isinstance(output.error, KVCacheTooSmallError)


def test_best_of_n_is_no_choice_and_may_be_streamed(bench: Bench) -> None:
    bench.add("a", OutputKind.DELTA, n=2, best_of=2)
    with pytest.raises(InvalidRequestError, match="best_of=3.*streamed"):
        bench.add("b", OutputKind.DELTA, n=2, best_of=3)
    assert "b" not in bench.outputs.request_ids()


@pytest.mark.parametrize("kind", OutputKind)
def test_prompt_logprobs_come_in_pieces_and_are_told_whole(bench: Bench, kind: OutputKind) -> None:
    bench.add(kind=kind, prompt_logprobs=2)  # the prompt is 2, h, i
    first, second = bench.doubles.logprobs(-1.0, -2.0)
    assert bench.take(bench.doubles.news("r", "", new_prompt_logprobs=[first])) is None, "a piece is no news"
    output = bench.take(bench.doubles.news("r", "x", new_prompt_logprobs=[second]))
    last = bench.take(bench.doubles.news("r", "y", "length"))
    assert last is not None
    told = {OutputKind.CUMULATIVE: (output, last), OutputKind.DELTA: (output,), OutputKind.FINAL: (last,)}[kind]
    for each in told:
        assert each is not None and each.prompt_logprobs is not None
        none, h, i = each.prompt_logprobs
        assert none is None and h is not None and i is not None
        assert list(h) == [ord("h"), 65, 66] and h[ord("h")] == (-1.0, 2, "h") and h[66] == (-0.2, 2, "B")
        assert i[ord("i")].logprob == -2.0
    if kind is OutputKind.DELTA:
        assert last.prompt_logprobs is None, "told once"


def test_a_prompt_of_one_token_has_nothing_to_score(bench: Bench) -> None:
    processed = bench.inputs.process("r", [5], SamplingParams(prompt_logprobs=1))
    bench.outputs.add(processed)
    output = bench.take(bench.doubles.news("r", "x", "length"))
    assert output is not None and output.prompt_logprobs == [None]
