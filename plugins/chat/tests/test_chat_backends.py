"""Who answers: an engine in this process, and a server."""

from __future__ import annotations

import signal

import pytest

from engine.types.errors import ConfigError, EngineError, KVCacheTooSmallError, PromptTooLongError, TokenizerError
from engine.types.params import SamplingParams
from engine_chat.embedded import EmbeddedBackend
from engine_chat.remote import RemoteBackend, ServerError, complete_url

ASK = [{"role": "user", "content": "Hi"}]


# -- an engine in this process ----------------------------------------------------------------------------------------
def test_the_engine_answers_in_pieces(doubles, make_engine):
    core = doubles.ScriptedCore({"user:Hi;!": ("hello", "stop")})
    backend = EmbeddedBackend(make_engine(core), SamplingParams(max_tokens=None))
    for _ in range(2):
        pieces = list(backend.answer(ASK))
        assert "".join(piece.text for piece in pieces) == "hello" and len(pieces) > 2
        assert pieces[-1].finish_reason == "stop"
    backend.close()
    assert core.closed == 1


def test_ctrl_c_ends_the_request_between_two_steps_and_the_engine_can_be_used_again(doubles, make_engine):
    core = doubles.ScriptedCore({"user:Hi;!": ("hello", "stop")})
    backend = EmbeddedBackend(make_engine(core), SamplingParams())
    answer = backend.answer(ASK)
    assert next(answer).text == "h"
    signal.raise_signal(signal.SIGINT)  # is kept until the next step is done
    with pytest.raises(KeyboardInterrupt):
        list(answer)
    assert core.aborted == ["chat-0"] and not core.running
    assert "".join(piece.text for piece in backend.answer(ASK)) == "hello"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_insists_within_a_step_leaves_the_program(doubles, make_engine):
    class Slow(doubles.ScriptedCore):
        def step(self):
            if self.steps:
                for _ in range(self.presses):
                    signal.raise_signal(signal.SIGINT)
            return super().step()

    core = Slow({"user:Hi;!": ("hello", "stop")})
    for core.presses, kind in ((2, KeyboardInterrupt), (3, SystemExit)):
        core.steps = 0
        with pytest.raises(kind):
            list(EmbeddedBackend(make_engine(core), SamplingParams()).answer(ASK))
        assert not core.running and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_answer_that_is_left_is_ended(doubles, make_engine):
    core = doubles.ScriptedCore({"user:Hi;!": ("hello", "stop")})
    answer = EmbeddedBackend(make_engine(core), SamplingParams()).answer(ASK)
    next(answer)
    answer.close()
    assert core.aborted == ["chat-0"]


def test_what_does_not_fit_is_a_typed_error(doubles, make_engine):
    core = doubles.ScriptedCore({"user:Hi;!": ("", "error")})
    backend = EmbeddedBackend(make_engine(core), SamplingParams())
    with pytest.raises(PromptTooLongError):
        next(backend.answer([{"role": "user", "content": "x" * 99}]))
    with pytest.raises(KVCacheTooSmallError):
        list(backend.answer(ASK))


def test_a_model_without_a_chat_template_is_refused_before_the_first_question(doubles, make_engine):
    engine = make_engine(doubles.ScriptedCore())

    def refuse(messages, **options):
        raise TokenizerError("chat", "there is no chat template")

    engine.frontend.tokenizer.render_chat = refuse
    with pytest.raises(TokenizerError):
        EmbeddedBackend(engine, SamplingParams())


# -- a server ---------------------------------------------------------------------------------------------------------
def test_the_server_answers_in_pieces(server):
    server.replies["Hi"] = ["hel", "lo", {"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": []}]
    backend = RemoteBackend(server.url, None, "secret", {"temperature": 0.5})
    pieces = list(backend.answer(ASK))
    assert "".join(piece.text for piece in pieces) == "hello" and pieces[-1].finish_reason == "stop"
    (path, headers, _), (chat, _, body) = server.requests
    assert (path, chat) == ("/v1/models", "/v1/chat/completions")
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"model": "stub-model", "messages": ASK, "stream": True, "temperature": 0.5}


def test_a_model_that_is_named_is_taken_and_no_key_is_sent_unasked(server):
    assert RemoteBackend(server.url, "mine").model == "mine"
    assert "Authorization" not in server.requests[0][1]


def test_leaving_an_answer_ends_it_on_the_server(server):
    server.replies["Hi"] = "forever"
    answer = RemoteBackend(server.url).answer(ASK)
    assert [next(answer).text, next(answer).text] == ["word ", "word "]
    answer.close()
    assert server.gone.wait(10)


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (
            (400, {"error": {"message": "99 tokens", "code": "context_length_exceeded"}}),
            PromptTooLongError,
            "99 tokens",
        ),
        ((400, {"error": {"message": "maximum context length is 9", "code": 400}}), PromptTooLongError, "is 9"),
        ((400, {"error": {"message": "bad", "code": "kv_cache_too_small"}}), KVCacheTooSmallError, "bad"),
        ((401, {"error": {"message": "no key"}}), ServerError, "401: no key; pass the server's key with --api-key"),
        ((429, {"error": "slow down"}), ServerError, "429: slow down; the server is busy"),
        ((404, {"detail": "Not Found"}), ServerError, "404: Not Found; check the path"),
        ((502, b"<html>bad gateway</html>"), ServerError, "502: no reason given"),
        (["a", {"error": {"message": "boom", "code": "engine_dead"}}], ServerError, "boom"),
        (["a", b"data: {broken\n\n"], ServerError, "an event is no JSON object"),
        (["a", b""], ServerError, "the server broke it off"),
    ],
)
def test_refusals_are_typed_and_say_what_to_do(server, reply, kind, says):
    server.replies["Hi"] = reply
    backend = RemoteBackend(server.url)
    with pytest.raises(EngineError) as caught:
        list(backend.answer(ASK))
    assert type(caught.value) is kind and says in str(caught.value)


@pytest.mark.parametrize("models", [{"object": "x"}, b"<html>", [1], {"data": [{}]}])
def test_what_is_no_such_server_is_refused_at_once(server, models):
    server.models = models
    with pytest.raises(ServerError, match="none of OpenAI's protocol"):
        RemoteBackend(server.url)


def test_a_server_that_serves_nothing(server):
    server.models = {"data": []}
    with pytest.raises(ServerError, match="serves no model"):
        RemoteBackend(server.url)


def test_nobody_listens():
    with pytest.raises(ServerError, match="is the server running"):
        RemoteBackend("http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://host", "http://host/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/proxy/v1", "https://host/proxy/v1"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1"),
    ],
)
def test_addresses_are_completed(given, url):
    assert complete_url(given) == url


@pytest.mark.parametrize(
    "given", ["", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://h/?a=1"]
)
def test_what_is_no_address(given):
    with pytest.raises(ConfigError, match="no address"):
        complete_url(given)
