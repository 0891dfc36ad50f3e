"""The kinds of hooks that decide: order, results, and what becomes of a failure."""

from __future__ import annotations

import pytest

from engine.plugin import HookRelay, Registry, hookimpl
from engine.types.errors import HookFailedError, RequestRefusedError, rebuild_error
from engine.types.hooks import RequestInfo
from engine.types.params import SamplingParams

INFO = RequestInfo(request_id="r", params=SamplingParams())
seen: list[str] = []


class Alpha:
    @hookimpl
    def admit(self, request):
        seen.append("alpha")

    @hookimpl
    def rewrite_prompt(self, prompt):
        return prompt + "a"

    @hookimpl
    def output_filter(self):
        held = ""

        def until_last(text, last):
            nonlocal held
            held += text
            return held + "." if last else ""

        return until_last


class Beta:
    @hookimpl
    def admit(self, request):
        seen.append("beta")
        if request.request_id == "bad":
            raise RequestRefusedError("beta", status=429)

    @hookimpl
    def rewrite_prompt(self, prompt, request):
        return None if prompt.endswith("!") else prompt + "b"

    @hookimpl
    def output_filter(self, request, index):
        return None if index else lambda text, last: text.upper()


class Broken:
    @hookimpl
    def admit(self, request):
        raise KeyError("inner secret")

    @hookimpl
    def rewrite_prompt(self, prompt):
        return 7

    @hookimpl
    def output_filter(self):
        return "not callable"

    @hookimpl
    def http_middleware(self, app):
        return None


class BadFilter:
    @hookimpl
    def output_filter(self, index):
        return [lambda text, last: None, lambda text, last: 1 / 0][index]


class Coroutine:
    @hookimpl
    async def admit(self, request):
        raise AssertionError("never awaited")


class Outer:
    @hookimpl(tryfirst=True)
    def http_middleware(self, app):
        return lambda: f"outer({app()})"


class Inner:
    @hookimpl(trylast=True)
    def http_middleware(self, app):
        return lambda: f"inner({app()})"


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


@pytest.fixture
def relay_of(candidate):
    def build(*names, options=None):
        found = [candidate("hooks.frontend", n.lower(), f"{__name__}:{n}", f"dist-{n}") for n in names]
        return HookRelay("frontend", Registry(found), options=options)

    return build


def test_nobody_decides():
    relay = HookRelay("frontend", Registry([]))
    hooks = ("admit", "rewrite_prompt", "output_filter", "http_middleware", "http_routes", "metrics")
    assert [getattr(relay, name) for name in hooks] == [None] * 6


def test_all_checks_are_asked_last_registered_first_until_one_refuses(relay_of):
    relay = relay_of("Alpha", "Beta")
    relay.admit(request=INFO)
    assert seen == ["beta", "alpha"]
    seen.clear()
    with pytest.raises(RequestRefusedError) as caught:
        relay.admit(request=RequestInfo(request_id="bad", params=SamplingParams()))
    assert caught.value.status == 429 and seen == ["beta"]
    assert not relay.failures


def test_a_chain_hands_on_the_text(relay_of):
    relay = relay_of("Alpha", "Beta")
    assert relay.rewrite_prompt(prompt="x", request=INFO) == "xba"
    assert relay.rewrite_prompt(prompt="x!", request=INFO) == "x!a"


def test_filters_hold_back_in_order(relay_of):
    relay = relay_of("Alpha", "Beta")
    chain = relay.output_filter(request=INFO, index=0)
    assert [chain("one ", False), chain("two", False), chain("", True)] == ["", "", "ONE TWO."]
    assert relay_of("Beta").output_filter(request=INFO, index=1) is None


def test_the_first_called_is_the_outermost(relay_of):
    app = relay_of("Inner", "Outer").http_middleware(lambda: "app", lambda one, layer, inner: layer)
    assert app() == "outer(inner(app))"


def test_middleware_that_cannot_be_made_is_told(relay_of):
    made = relay_of("Broken").http_middleware("app", lambda one, layer, inner: (one.hook, layer, inner))
    assert made == ("http_middleware", None, "app")


@pytest.mark.parametrize(
    "call",
    [
        lambda relay: relay.admit(request=INFO),
        lambda relay: relay.rewrite_prompt(prompt="x", request=INFO),
        lambda relay: relay.output_filter(request=INFO, index=0),
    ],
)
def test_a_failure_refuses_each_time_and_tells_no_inner_text(relay_of, caplog, call):
    relay = relay_of("Broken")
    for _ in range(20):
        with pytest.raises(HookFailedError, match=r"plugin 'broken' \(dist-Broken 1.0\)") as caught:
            call(relay)
        assert "inner secret" not in str(caught.value)
    assert sum(relay.failures.values()) == 20
    assert "dist-Broken" in caplog.text


@pytest.mark.parametrize("index", [0, 1])
def test_a_filter_that_fails(relay_of, index):
    relay = relay_of("BadFilter")
    chain = relay.output_filter(request=INFO, index=index)
    with pytest.raises(HookFailedError):
        chain("text", False)
    assert relay.failures["badfilter", "output_filter"] == 1


def test_a_coroutine_is_refused_because_nobody_would_await_it(relay_of, caplog):
    assert relay_of("Coroutine").admit is None
    assert "coroutine" in caplog.text


def test_refusals_have_the_status_of_one():
    assert (RequestRefusedError("a").status, RequestRefusedError("a").retry_after) == (403, None)
    with pytest.raises(ValueError, match="status=200"):
        RequestRefusedError("a", status=200)
    assert isinstance(rebuild_error(HookFailedError("a", "b", "c").parts), HookFailedError)
