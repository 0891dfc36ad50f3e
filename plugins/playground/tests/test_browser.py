"""The page in headless Chromium: what a reader sees and does. Answers are the bundled model's, but where a test needs
a certain one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("playground")

CHAT = "**/v1/chat/completions"
ENDED = ".assistant:not(.answering)"


def events(*deltas: dict[str, Any], reason: str = "stop", error: str = "") -> str:
    """A streamed answer, as the server sends it."""
    told: list[Any] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if error:
        told.append({"error": {"message": error, "type": "server_error", "param": None, "code": "engine_dead"}})
    else:
        told.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    return "".join(f"data: {json.dumps(one)}\n\n" for one in told) + "data: [DONE]\n\n"


def answer_with(page: Any, *streams: str) -> list[dict[str, Any]]:
    """Answer the next requests so; the bodies that came."""
    bodies: list[dict[str, Any]] = []

    def fulfil(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(status=200, content_type="text/event-stream", body=streams[len(bodies) - 1])

    page.route(CHAT, fulfil)
    return bodies


def endless(route: Any) -> None:
    """Send the request on, for as many tokens as it may have."""
    body = json.loads(route.request.post_data) | {"ignore_eos": True}
    route.continue_(post_data=json.dumps(body))


def until(page: Any, expression: str) -> None:
    """Wait for it. Playwright's own wait evaluates in the page, which the page's policy refuses."""
    deadline = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(30)


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_an_answer_streams_in(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.evaluate("""() => {
        window.lengths = new Set();
        new MutationObserver(() => {
            const text = document.querySelector(".assistant .text");
            if (text) window.lengths.add(text.textContent.length);
        }).observe(document.getElementById("messages"), { subtree: true, childList: true, characterData: true });
    }""")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "200")
    page.route(CHAT, endless)
    say(page, "What is the capital of France?")
    page.wait_for_selector(ENDED)
    assert "Paris" in page.inner_text(".assistant .text")
    assert page.evaluate("window.lengths.size") > 3, "it came at once"
    assert "tokens" in page.inner_text(".assistant .measured")
    assert page.inner_text("#said") == "The answer is complete."
    until(page, "document.getElementById('facts').textContent.startsWith('tiny')")
    until(page, "document.getElementById('drivers').children.length > 5")
    until(page, "document.getElementById('hits-note').textContent.includes('prompt tokens')")
    assert "of 599 pages held" in page.inner_text("#kv")
    assert page.evaluate("document.querySelector('#maps canvas').width") > 100
    say(page, "And of Italy?")
    page.wait_for_selector(f"li:nth-child(4){ENDED}")


def test_stop_ends_the_answer_here_and_on_the_server(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.route(CHAT, endless)
    say(page, "Tell me a long tale.")
    until(page, "document.querySelector('.assistant .text')?.textContent.length > 20")
    until(page, "document.getElementById('running').textContent === '1'")
    page.click("#stop-answer")
    page.wait_for_selector(ENDED)
    assert "stopped" in page.inner_text(".measured") and page.inner_text("#said") == "Stopped."
    text = page.inner_text(".assistant .text")
    until(page, "document.getElementById('running').textContent === '0'")
    assert page.inner_text(".assistant .text") == text and page.is_visible("#send")
    page.unroute(CHAT)
    bodies = answer_with(page, events({"content": "More."}))
    say(page, "Go on.")
    page.wait_for_selector(f"li:nth-child(4){ENDED}")
    assert [message["role"] for message in bodies[0]["messages"]] == ["user", "assistant", "user"]
    assert bodies[0]["messages"][1]["content"].strip() == text.strip()


def test_errors_are_shown(open_page: Callable[..., Any]) -> None:
    page = open_page(key=None, expected=("401", "400"))
    until(page, "document.getElementById('live-fault').textContent.includes('no valid API key')")
    say(page, "Hello")
    page.wait_for_selector("[role=alert]")
    assert "no valid API key" in page.inner_text("[role=alert]")
    assert page.get_attribute("#key", "aria-invalid") == "true" and not page.query_selector(".assistant")
    page.fill("#key", "a-key-of-the-tests")
    page.press("#key", "Tab")
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.click("[role=alert] button")
    page.wait_for_selector(ENDED)
    assert not page.query_selector("[role=alert]")
    until(page, "document.getElementById('live-fault').textContent === ''")
    page.fill("#temperature", "-1")
    say(page, "Hello")
    page.wait_for_selector("[role=alert]")
    assert "temperature" in page.inner_text("[role=alert]")
    page.fill("#temperature", "")
    bodies = answer_with(page, events({"content": "Half an "}, error="the engine core has died"))
    say(page, "Once more")
    until(page, "document.querySelector('[role=alert]')?.textContent.includes('has died')")
    assert page.locator(".assistant .text").last.inner_text().strip() == "Half an"
    assert bodies[0]["messages"][-1] == {"role": "user", "content": "Once more"}
    assert bodies[0]["messages"][-2]["role"] == "assistant", "the refused message is not told again"


def test_what_the_model_writes_is_text(open_page: Callable[..., Any]) -> None:
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    function = {"name": evil, "arguments": json.dumps({"a": evil})}
    calls = {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]}
    page = open_page()
    answer_with(page, events({"reasoning_content": evil}, {"content": evil}, calls, reason="tool_calls"))
    say(page, evil)
    page.wait_for_selector(ENDED)
    texts = page.locator("#messages .text").all_inner_texts()
    assert [text.strip() for text in texts] == [evil] * 3
    assert evil in page.inner_text(".call h4")
    assert not page.query_selector("#messages img, #messages script") and "Engine playground" in page.title()


def test_tools_and_settings_are_sent(open_page: Callable[..., Any]) -> None:
    parts = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"ci'}}]
    rest = [{"index": 0, "function": {"arguments": 'ty": "Rome"}'}}]
    page = open_page()
    first = events({"tool_calls": parts}, {"tool_calls": rest}, reason="tool_calls")
    bodies = answer_with(page, first, events({"content": "It rains in Rome."}))
    page.fill("#system", "Be brief.")
    for name, value in {"temperature": "0.5", "top_p": "0.9", "top_k": "40", "max_tokens": "64", "seed": "7"}.items():
        page.fill(f"#{name}", value)
    page.fill("#stop", "END\nSTOP")
    page.click("#tools-example")
    page.select_option("#tool-choice", "function:get_weather")
    say(page, "How is the weather in Rome?")
    page.wait_for_selector(".results")
    assert '"city": "Rome"' in page.inner_text(".call pre")
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    sent = {name: bodies[0][name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop")}
    assert sent == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 64, "seed": 7, "stop": ["END", "STOP"]
    }  # fmt: skip
    assert "min_p" not in bodies[0] and "response_format" not in bodies[0]
    assert bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
    page.keyboard.type('{"rain": true}')  # the field has the focus
    page.click(".results button")
    page.wait_for_selector(f"li:nth-child(4){ENDED}")
    called, result = bodies[1]["messages"][-2:]
    assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'}
    assert bodies[1]["tool_choice"] == "auto"


def test_a_call_that_is_cut_off_is_not_told_again(open_page: Callable[..., Any]) -> None:
    part = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"ci'}}
    page = open_page()
    cut = events({"content": "Let me look."}, {"tool_calls": [part]}, reason="length")
    bodies = answer_with(page, cut, events({"content": "Yes."}))
    say(page, "How is the weather?")
    page.wait_for_selector(ENDED)
    assert "cut off" in page.inner_text(".measured") and not page.query_selector(".results")
    assert page.inner_text(".call pre") == '{"ci'
    say(page, "Is it good?")
    page.wait_for_selector(f"li:nth-child(4){ENDED}")
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Let me look."}


def test_json_by_a_schema_from_the_real_model(open_page: Callable[..., Any]) -> None:
    pytest.importorskip("xgrammar", reason="no grammar driver's library is installed")
    page = open_page()
    page.select_option("#format", "json_schema")
    page.fill("#schema", "{not json")
    say(page, "Hello")
    assert "not valid JSON" in page.inner_text("#schema-error")
    assert page.evaluate("document.activeElement.id") == "schema" and not page.query_selector(".user")
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    page.fill("#schema", json.dumps(schema | {"additionalProperties": False}))
    assert page.inner_text("#schema-error") == ""
    say(page, "Is Paris in France?")
    page.wait_for_selector(ENDED)
    assert isinstance(json.loads(page.inner_text(".assistant .text"))["yes"], bool)


def test_all_by_keyboard(open_page: Callable[..., Any]) -> None:
    page = open_page()
    focused = "document.activeElement.id || document.activeElement.textContent"
    assert page.evaluate(focused) == "prompt"
    bodies = answer_with(page, events({"content": "Hi."}), events({"content": "Again."}))
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(ENDED)
    assert bodies[0]["messages"][0]["content"] == "one\ntwo"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(focused) == "Answer again"
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.assistant .text')?.textContent === 'Again.'")
    page.focus("#prompt")
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "new"
    page.keyboard.press("Enter")
    assert not page.query_selector("#messages li") and page.evaluate(focused) == "prompt"
    page.evaluate("document.activeElement.blur(); window.getSelection().removeAllRanges()")
    page.reload()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(focused))
    wanted = {
        "key",
        "system",
        "temperature",
        "seed",
        "stop",
        "format",
        "tools",
        "tool-choice",
        "prompt",
        "send",
        "theme",
    }
    assert wanted <= reached


def test_themes_and_a_phone(open_page: Callable[..., Any]) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    page = open_page(color_scheme="dark", viewport={"width": 390, "height": 844})
    dark = page.evaluate(back)
    page.click("#theme")
    light = page.evaluate(back)
    assert dark != light and page.inner_text("#theme") == "Theme: light"
    page.reload()
    assert page.evaluate(back) == light
    for view in ("settings", "live", "chat"):
        page.click(f"[data-show={view}]")
        assert [page.is_visible(f"#{name}") for name in ("settings", "live", "chat")] == [
            name == view for name in ("settings", "live", "chat")
        ]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
