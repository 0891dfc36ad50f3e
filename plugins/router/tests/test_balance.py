"""One front of servers that answer whole requests."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fakes import Fake, merged, routed
from prometheus_client.parser import text_string_to_metric_families

from engine.types.errors import ConfigError
from engine_router.config import read_config
from engine_router.connections import Address

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never")


async def test_requests_take_turns_and_keep_their_ids():
    a, b = Fake("a"), Fake("b")
    async with routed(a, b) as client:
        for i in range(4):
            headers = {"x-request-id": f"id-{i}", "authorization": "Bearer k"}
            answer = await client.post(CHAT, json=BODY, headers=headers)
            assert answer.status_code == 200
            assert answer.headers["x-request-id"] == f"id-{i}"
    assert [len(a.asked), len(b.asked)] == [2, 2]
    assert a.asked[0] == BODY
    assert {head["x-request-id"] for head in a.heads + b.heads} == {f"id-{i}" for i in range(4)}
    assert all(head["authorization"] == "Bearer k" for head in a.heads)


async def test_a_router_that_follows_prefixes_does():
    a, b = Fake("a"), Fake("b")
    prompts = [f"{letter}" * 300 for letter in "xyxyxy"]
    async with routed(a, b, router="prefix_aware") as client:
        for prompt in prompts:
            await client.post("/v1/completions", json={"prompt": prompt})
    assert [len({one["prompt"] for one in fake.asked}) for fake in (a, b)] == [1, 1]


async def test_events_are_passed_on():
    a = Fake("a")
    async with routed(a) as client:
        answer = await client.post(CHAT, json={**BODY, "stream": True})
    assert answer.text.count("data: ") == 4
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("play", ["503", "die"])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_answers_where_one_does_not(play, stream):
    a, b = Fake("a"), Fake("b")
    a.play = play
    async with routed(a, b) as client:
        answers = [await client.post(CHAT, json={**BODY, "stream": stream}) for _ in range(2)]
    assert all(answer.status_code == 200 and '"b"' in answer.text for answer in answers)


async def test_what_two_died_of_is_not_tried_a_third_time():
    fakes = [Fake(name) for name in "abc"]
    for fake in fakes:
        fake.play = "die"
    async with routed(*fakes) as client:
        answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_backend"
    assert sum(len(fake.asked) for fake in fakes) == 2


async def test_one_that_is_gone_is_passed_over_until_it_is_back():
    a, b = Fake("a"), Fake("b")
    async with routed(a, b) as client:
        await a.stop()
        for _ in range(3):
            assert (await client.post(CHAT, json=BODY)).json()["from"] == "b"
        assert (await client.get("/health")).json()["status"] == "degraded"
        await a.start()
        for _ in range(500):
            if (await client.get("/health")).json()["status"] == "ok":
                break
            await asyncio.sleep(0.01)
        assert {(await client.post(CHAT, json=BODY)).json()["from"] for _ in range(2)} == {"a", "b"}


async def test_without_any_server_requests_are_refused():
    a = Fake("a")
    async with routed(a) as client:
        await a.stop()
        answer = await client.post("/v1/messages", json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "overloaded_error"
        assert answer.headers["retry-after"] == "1"
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/ready")).json() == {"status": "dead"}


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (CHAT, "data: [DONE]\n\n"),
        ("/v1/messages", None),
        ("/v1/responses", None),
    ],
)
async def test_a_stream_whose_server_dies_ends_with_an_error_and_no_half_event(path, end):
    a, b = Fake("a"), Fake("b")
    a.play = b.play = "die_in_stream"
    async with routed(a, b) as client:
        answer = await client.post(path, json={**BODY, "stream": True})
    assert len(a.asked) + len(b.asked) == 1, "what has begun to stream was sent again"
    events = [part for part in answer.text.split("\n\n") if part]
    assert events[0].startswith("data: {") and events[0].endswith('"i":0}')
    assert "has died" in events[1]
    assert len(events) == (3 if end else 2)


async def test_a_client_that_leaves_is_left_behind():
    a = Fake("a")
    a.play = "hang"
    async with routed(a) as client:
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break
        await until(lambda: a.left == 1)
        a.go.clear()
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=BODY, timeout=0.05)
        await until(lambda: a.left == 2)


async def test_a_response_is_asked_for_where_it_is_kept():
    a, b = Fake("a"), Fake("b")
    async with routed(a, b) as client:
        one = await client.post("/v1/responses", json={"input": "x"})
        two = await client.post("/v1/responses", json={"input": "x", "stream": True})
        kept = {"resp_a", "resp_b"}
        assert one.json()["id"] in kept and one.json()["id"] not in two.text
        for name in kept:
            assert (await client.get(f"/v1/responses/{name}")).json()["id"] == name
        more = {"input": "y", "previous_response_id": "resp_a"}
        assert {(await client.post("/v1/responses", json=more)).json()["from"] for _ in range(3)} == {"a"}
        await a.stop()
        a.play = "die"
        assert (await client.post("/v1/responses", json=more)).status_code == 503
    async with routed(Fake("c"), Fake("d")) as client:  # which knows of none
        assert (await client.get("/v1/responses/resp_d")).json()["id"] == "resp_d"
        assert (await client.get("/v1/responses/resp_x")).status_code == 404


async def test_metrics_of_all_are_one_page():
    a, b = Fake("a"), Fake("b")
    async with routed(a, b) as client:
        await client.post(CHAT, json=BODY)
        text = (await client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {sample.labels["backend"] for sample in families["engine:x"].samples} == {a.url, b.url}
    assert all(sample.value == 1 for sample in families["engine_router:backend_up"].samples)
    assert sum(sample.value for sample in families["engine_router:requests"].samples) == 1
    assert text.count("# TYPE engine:x_total ") == 1


async def test_what_is_no_json_is_answered_by_a_server_and_administration_by_none():
    a = Fake("a")
    a.play = "400"
    async with routed(a) as client:
        assert (await client.post(CHAT, json=[1])).status_code == 400
        assert (await client.get("/v1/models")).status_code == 400
        assert (await client.post("/admin/kv/reset", json={})).status_code == 404
    assert a.paths == [f"POST {CHAT}", "GET /v1/models"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill": ("http://a:1",)},
        {"decode": ("http://a:1",)},
        {"backend": ("http://a:1",), "decode": ("http://a:1",)},
    ],
)
def test_servers_that_do_not_go_together_are_refused(settings):
    with pytest.raises(ConfigError):
        read_config(merged(**settings))


@pytest.mark.parametrize("text", ["ftp://x", "http://", "http://x:99999", "http://x?y=1"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="no address"):
        Address(text)
