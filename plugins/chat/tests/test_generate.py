"""`engine generate`, with an engine that says what it is told."""

from __future__ import annotations

import io
import sys
import types
from dataclasses import dataclass, field

import pytest

from engine.types.errors import KVCacheTooSmallError, ModelNotFoundError
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.params import SamplingDefaults


@dataclass
class FakeEngine:
    """Streams `pieces`; remembers what it was asked."""

    pieces: tuple[object, ...] = ("Once", " upon", " a time")
    asked: dict = field(default_factory=dict)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    plan: object = None
    stop: tuple[str, object] = ("stop", None)

    def from_engine_args(self, config):
        self.asked["config"] = config
        return self

    def add_request(self, request_id, prompt, params):
        self.asked |= {"prompt": prompt, "params": params}
        self.left = list(self.pieces)
        self.text = ""

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        piece = self.left.pop(0)
        if isinstance(piece, BaseException):
            raise piece
        self.text += piece
        reasons = {} if self.left else {"finish_reason": self.stop[0], "stop_reason": self.stop[1]}
        completion = CompletionOutput(0, text=self.text, **reasons)
        return [RequestOutput("generate", "p", [1], [completion], finished=not self.left)]

    @property
    def frontend(self):
        return types.SimpleNamespace(inputs=types.SimpleNamespace(render_chat=lambda messages: {"prompt": messages}))

    def shutdown(self):
        self.asked["shutdown"] = True


@pytest.fixture
def engine(monkeypatch):
    fake = FakeEngine()
    module = types.ModuleType("engine.llm")
    module.LLMEngine = fake
    monkeypatch.setitem(sys.modules, "engine.llm", module)
    return fake


def test_the_text_comes_as_it_is_made(program, engine, monkeypatch):
    writes = []
    monkeypatch.setattr(
        sys,
        "stdout",
        types.SimpleNamespace(write=writes.append, flush=lambda: writes.append(None), isatty=lambda: False),
    )
    assert program("generate", "Tell")[0] == 0
    assert writes[:8] == ["Once", None, " upon", None, " a time", None, "\n", None]
    assert engine.asked["prompt"] == "Tell" and engine.asked["shutdown"]


def test_flags_reach_the_config_and_the_sampling(program, engine):
    code, out, _ = program(
        "generate", "--model", "/m", "--attention=torch", "--attention.num_splits", "4", "--max-tokens", "7",
        "--temperature=0.5", "--top_p", "0.9", "--top-k=5", "--min-p", "0.1", "--seed", "11", "--stop", "a",
        "--stop", "b", "--stop-token-ids", "1,2", "--ignore-eos", "--no-enable-prefix-caching", "Tell",
    )  # fmt: skip
    assert (code, out) == (0, "Once upon a time\n")
    config, params = engine.asked["config"], engine.asked["params"]
    assert (config.model, config.asked("attention"), config.seed) == ("/m", "torch", 11)
    assert config.options == {"attention": {"num_splits": "4"}} and not config.enable_prefix_caching
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0.5, 0.9, 5, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (11, ["a", "b"], [1, 2], True)


def test_without_flags_the_engines_defaults_hold(program, engine):
    program("generate", "Tell")
    assert engine.asked["params"].seed is None and engine.asked["params"].max_tokens == 128
    engine.sampling_defaults = SamplingDefaults(params={"max_tokens": 5, "top_k": 3, "temperature": 0.5})
    assert program("generate", "--temperature", "2", "Tell")[0] == 0
    params = engine.asked["params"]
    assert (params.max_tokens, params.top_k, params.temperature) == (5, 3, 2.0)
    assert engine.asked["config"].model is None


def test_the_prompt_may_come_from_standard_input(program, engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert program("generate")[0] == 0
    assert engine.asked["prompt"] == "from a pipe"


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_standard_input_is_told(program, engine, monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code, _, err = program("generate")
    assert code == 2 and "generate from standard input\n  found: it is empty" in err and engine.asked == {}


def test_a_question_goes_through_the_chat_template(program, engine):
    assert program("generate", "--chat", "Who?")[0] == 0
    assert engine.asked["prompt"] == {"prompt": [{"role": "user", "content": "Who?"}]}


@pytest.mark.parametrize(
    ("stop", "template", "flags", "says"),
    [
        (("stop", None), True, [], "its end of sequence; a question wants --chat, which"),
        (("stop", None), True, ["--chat"], "its end of sequence; --min-tokens N has it go on"),
        (("stop", None), False, [], "its end of sequence; --min-tokens N has it go on"),
        (("stop", "Qu"), True, ["--stop", "Qu"], "the stop text 'Qu' came first; leave it out of --stop"),
        (("stop", 7), True, ["--stop-token-ids", "7"], "the stop token 7 came first"),
        (("length", None), True, [], "as many tokens as it may have were made"),
    ],
)
@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_answer_says_why(program, engine, stop, template, flags, says, text):
    engine.pieces = (text,)
    engine.stop = stop
    engine.plan = types.SimpleNamespace(has_chat_template=template)
    code, _, err = program("generate", *flags, "Who?")
    assert code == 0 and err.startswith("note: the answer is empty: ") and says in err and err.count("\n") == 1


def test_no_prompt_on_a_terminal(program, engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    code, _, err = program("generate")
    assert code == 2 and "there is no prompt" in err


def test_an_engine_error_is_one_message_and_exit_code_2(program, engine):
    engine.pieces = ("Once", ModelNotFoundError("open '/m'", "no such folder", "check the path"))
    code, out, err = program("generate", "Tell")
    assert (code, out) == (2, "Once\n")
    assert err == "error: open '/m'\n  found: no such folder\n  to do: check the path\n"
    assert engine.asked["shutdown"]


def test_a_request_that_failed_is_one_message_and_exit_code_2(program, engine, monkeypatch):
    failed = RequestOutput("generate", "p", [1], [CompletionOutput(0)], finished=True)
    failed.error = KVCacheTooSmallError("serve the prompt", "it needs 9 pages of 4")
    monkeypatch.setattr(engine, "step", lambda: [failed])
    code, _, err = program("generate", "Tell")
    assert code == 2 and err == "error: serve the prompt\n  found: it needs 9 pages of 4\n"


def test_ctrl_c_ends_the_line_and_exits_130(program, engine):
    engine.pieces = ("Once", KeyboardInterrupt())
    code, out, err = program("generate", "Tell")
    assert (code, out, err) == (130, "Once\n", "")
    assert engine.asked["shutdown"]


def test_a_bad_setting_says_where_it_was_set(program, engine):
    code, _, err = program("generate", "--max-num-seqs", "many", "Tell")
    assert code == 2 and "set max_num_seqs to 'many' (flag --max-num-seqs)" in err


def test_a_bad_number_is_refused_before_anything_starts(program, engine, capsys):
    with pytest.raises(SystemExit) as caught:
        program("generate", "--top-k", "x", "Tell")
    assert caught.value.code == 2 and "--top-k" in capsys.readouterr().err
    assert engine.asked == {}
