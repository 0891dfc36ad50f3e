"""`engine generate --input`: results in order, errors on their line, one engine for all."""

from __future__ import annotations

import io
import json
import sys

import pytest

from engine.cli.batch import Batch
from engine.cli.batch_lines import parse_lines
from engine.types.errors import EngineDeadError


@pytest.fixture
def batch(make_engine):
    def run(core, text, *, at_once=100, **sampling):
        out = io.StringIO()
        work = Batch(make_engine(core), parse_lines(text, "jsonl"), sampling, out, at_once)
        try:
            work.run(bar=False)
        finally:
            work.results = [json.loads(line) for line in out.getvalue().splitlines()]
        return work

    return run


def lines(*contents):
    return "\n".join(content if isinstance(content, str) else json.dumps(content) for content in contents)


def test_results_come_in_the_order_of_the_lines_whatever_ends_first(doubles, batch):
    core = doubles.ScriptedCore({"a": ("long answer", "stop"), "b": ("b", "stop"), "c": ("mid", "stop")})
    work = batch(core, lines({"prompt": "a", "id": "one"}, {"prompt": "b"}, "", {"prompt": "c"}))
    assert [(r["line"], r["text"], r["finish_reason"]) for r in work.results] == [
        (1, "long answer", "stop"), (2, "b", "stop"), (4, "mid", "stop")]  # fmt: skip
    assert work.results[0]["id"] == "one" and "id" not in work.results[1]
    assert work.results[1] | {"text": 0} == {
        "line": 2, "text": 0, "finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": 0,
    }  # fmt: skip
    assert work.failed == []


def test_a_line_that_fails_has_a_typed_error_in_its_place_and_the_others_go_on(doubles, batch):
    core = doubles.ScriptedCore({"dies": ("", "error")})
    text = lines(
        {"prompt": "a"}, "nonsense", {"prompt": "a", "temperature": "hot"}, {"prompt": "x" * 99}, {"prompt": "dies"},
        {"messages": [{"content": "no role"}]}, {"prompt": "b"},
    )  # fmt: skip
    work = batch(core, text)
    assert [r.get("text") for r in work.results] == ["ok", None, None, None, None, None, "ok"]
    codes = [r["error"]["code"] for r in work.results if "error" in r]
    assert codes == [
        "invalid_request", "invalid_request", "context_length_exceeded", "kv_cache_too_small", "invalid_request",
    ]  # fmt: skip
    assert sorted(number for number, _ in work.failed) == [2, 3, 4, 5, 6]
    assert work.results[2]["error"]["asked"] == "temperature='hot'"


def test_a_lines_own_parameters_go_before_the_flags(doubles, batch):
    core = doubles.ScriptedCore({"a": ("abcdef", "stop")})
    text = lines({"prompt": "a"}, {"prompt": "a", "max_tokens": 4}, {"prompt": "a", "n": 2, "max_tokens": 1})
    work = batch(core, text, max_tokens=2)
    assert [r.get("text") for r in work.results] == ["ab", "abcd", None]
    assert [o["text"] for o in work.results[2]["outputs"]] == ["a", "a"]
    assert work.results[2]["completion_tokens"] == 2


def test_conversations_go_through_the_chat_template(doubles, batch):
    core = doubles.ScriptedCore({"user:Hi;!": ("hello", "stop")})
    assert batch(core, lines({"messages": [{"role": "user", "content": "Hi"}]})).results[0]["text"] == "hello"


def test_only_so_many_are_queued_at_once(doubles, batch):
    class Counting(doubles.ScriptedCore):
        most = 0

        def step(self):
            Counting.most = max(Counting.most, len(self.running))
            return super().step()

    work = batch(Counting(), lines(*[{"prompt": "p"}] * 20), at_once=3)
    assert len(work.results) == 20 and Counting.most == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineDeadError("compute a step", "boom")])
def test_what_was_complete_is_written_when_it_ends_early(doubles, make_engine, error):
    core = doubles.ScriptedCore({"a": ("a", "stop"), "b": ("a long answer", "stop")})
    core.raise_at_step[4] = error
    out = io.StringIO()
    engine = make_engine(core)
    work = Batch(engine, parse_lines(lines({"prompt": "a"}, {"prompt": "b"}), "jsonl"), {}, out, 10)
    with pytest.raises(type(error)):
        work.run(bar=False)
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == ["a"]
    if isinstance(error, KeyboardInterrupt):
        assert core.aborted == ["line-1"] and not core.running


def test_an_id_that_is_no_utf8_is_escaped(doubles, batch):
    assert batch(doubles.ScriptedCore(), '{"prompt": "a", "id": "\\ud800"}').results[0]["id"] == "\ud800"


# -- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def command(monkeypatch, make_engine, doubles, program):
    """`engine generate` on a scripted core."""
    import engine.llm

    core = doubles.ScriptedCore({"a": ("one", "stop"), "b": ("two", "stop")})
    monkeypatch.setattr(engine.llm.LLMEngine, "from_engine_args", classmethod(lambda cls, config: make_engine(core)))

    def run(*arguments):
        return (*program("generate", *arguments), core)

    return run


def test_from_file_to_file(command, tmp_path):
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_bytes(b"\xef\xbb\xbfa\r\n\nb\n")
    code, out, err, core = command("--input", str(source), "--output", str(target))
    assert (code, out, err) == (0, "", "")  # no bar where standard error is no terminal
    assert [(r["line"], r["text"]) for r in map(json.loads, target.read_text().splitlines())] == [
        (1, "one"),
        (3, "two"),
    ]
    assert core.closed == 1


def test_from_standard_input_to_standard_output(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"promt": "b"}\n')))
    code, out, err, _ = command("--input", "-")
    first, second = map(json.loads, out.splitlines())
    assert code == 2 and first["text"] == "one" and second["error"]["remedy"] == "did you mean 'prompt'?"
    assert "error: line 2; there is no key 'promt'" in err and "1 of 2 requests failed" in err


def test_one_prompt_may_have_its_result_written(command):
    code, out, _, _ = command("a", "--output", "-")
    assert code == 0 and json.loads(out)["text"] == "one"


def test_the_format_may_be_said(command, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("a\n")
    assert json.loads(command("--input", str(source), "--input-format", "text")[1])["text"] == "one"


def test_every_text_of_a_file_may_be_a_message(command, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"prompt": "Hi"}\n{"prompt_token_ids": [97]}\n{"messages": [{"role": "user", "content": "Ho"}]}\n'
    )
    code, _, _, core = command("--input", str(source), "--chat")
    assert code == 0
    said = ["".join(map(chr, request.prompt_token_ids)).lstrip("\x02") for request in core.requests]
    assert said == ["user:Hi;!", "a", "user:Ho;!"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a", "--input", "FILE"], "there are both"),
        (["a", "--input-format", "text"], "there is no --input"),
        (["--input", "GONE"], "No such file"),
        (["--input", "EMPTY"], "it is empty"),
        (["--input", "BINARY"], "no UTF-8 text"),
        (["--input", "PLAIN.jsonl"], "none of its 2 lines is a JSON object"),
        (["--input", "FILE", "--output", "FILE"], "it is the --input, which would be lost"),
        (["--input", "FILE", "--output", "GONE/x"], "write --output"),
        (["--input", "FILE", "--temperature", "nan"], "temperature=nan"),
    ],
)
def test_what_cannot_work_is_said_before_an_engine_starts(command, tmp_path, arguments, says):
    (tmp_path / "FILE").write_text("a\n")
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "PLAIN.jsonl").write_text("a\n[1]\n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe")
    known = ("FILE", "GONE", "EMPTY", "BINARY", "GONE/x", "PLAIN.jsonl")
    code, out, err, core = command(*(str(tmp_path / a) if a in known else a for a in arguments))
    assert (code, out) == (2, "") and says in err
    assert core.requests == [] and (tmp_path / "FILE").read_text() == "a\n"


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_shown_where_standard_error_is_a_terminal(command, tmp_path, monkeypatch):
    source, screen = tmp_path / "in.txt", Screen()
    source.write_text("a\nb\n")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", screen)
    assert command("--input", str(source))[0] == 0
    assert "2/2" in screen.getvalue() and "Processed prompts" in screen.getvalue()
