"""One server computes the prompt, another goes on."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from fakes import PARAMS, Fake, merged, routed
from test_balance import until

from engine.types.errors import ConfigError
from engine_router.config import read_config
from engine_router.disaggregation import for_prefill
from engine_router.run import Router
from engine_server.anthropic.input import MessagesBody

PATHS = {
    "/v1/completions": ({"prompt": "hello", "max_tokens": 9, "n": 2, "logprobs": 1}, "max_tokens"),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 9, "stream_options": {}},
        "max_tokens",
    ),
    "/v1/responses": ({"input": "x", "max_output_tokens": 9}, "max_output_tokens"),
    "/v1/messages": ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}, "max_tokens"),
}


def whole_requests(text: str) -> dict[str, int]:
    lines = [line for line in text.splitlines() if line.startswith("engine_router:whole_requests_total{")]
    return {line.split('"')[1]: int(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_first(path, stream):
    p, d = Fake("p"), Fake("d")
    body, limit = PATHS[path]
    body = {**body, "stream": stream}
    async with routed(d, prefill=(p,)) as client:
        answer = await client.post(path, json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200 and '"d"' in answer.text
    (asked,) = p.asked
    assert asked[limit] == 1
    assert not asked.keys() & {"stream", "stream_options", "n", "logprobs", "max_completion_tokens"}
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert asked["kv_transfer_params"]["remote_block_ids"] is None
    assert d.asked == [{**body, "kv_transfer_params": {**PARAMS, "remote_port": p.port}}]
    assert p.heads[0]["x-request-id"] == d.heads[0]["x-request-id"] == "mine"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": "a", "prompt_logprobs": 1},
    ],
)
async def test_what_cannot_be_divided_is_not(body):
    p, d = Fake("p"), Fake("d")
    async with routed(d, prefill=(p,)) as client:
        await client.post("/v1/completions", json=body)
    assert (p.asked, d.asked) == ([], [body])


async def test_clients_do_not_say_whom_servers_connect_to():
    p, d = Fake("p"), Fake("d")
    async with routed(d, prefill=(p,)) as client:
        body = {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
        answer = await client.post("/v1/completions", json=body)
        loose = b'{"prompt": "a", "top_p": NaN, "kv_transfer_params": {"do_remote_prefill": true}}'
        assert (await client.post("/v1/completions", content=loose)).status_code == 400
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params"
    assert (p.asked, d.asked) == ([], [])


@pytest.mark.parametrize(
    ("play", "why"), [("die", "no_prefill_server"), ("400", "prefill_refused"), ("500", "prefill_refused")]
)
async def test_a_prompt_that_nobody_computes_is_computed_where_it_goes_on(play, why):
    p, d = Fake("p"), Fake("d")
    p.play = play
    body = PATHS["/v1/messages"][0]
    async with routed(d, prefill=(p,)) as client:
        answer = await client.post("/v1/messages", json=body)
        counted = whole_requests((await client.get("/metrics")).text)
    assert answer.json()["from"] == "d"
    assert d.asked == [body]
    assert counted == {why: 1}


async def test_another_computes_the_prompt_where_one_is_gone():
    p, q, d = Fake("p"), Fake("q"), Fake("d")
    async with routed(d, prefill=(p, q)) as client:
        await p.stop()
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "x"})
    assert len(q.asked) == 2
    assert [one["kv_transfer_params"]["remote_port"] for one in d.asked] == [q.port] * 2


async def test_another_goes_on_where_one_is_gone():
    p, d, e = Fake("p"), Fake("d"), Fake("e")
    d.play = "die"
    async with routed(d, e, prefill=(p,)) as client:
        answers = [await client.post("/v1/completions", json={"prompt": "x"}) for _ in range(2)]
    assert all(answer.json()["from"] == "e" for answer in answers)
    assert all(one["kv_transfer_params"]["do_remote_prefill"] for one in e.asked)


@pytest.mark.parametrize("order", ["prefill-first", "decode-first"])
async def test_a_client_that_leaves_leaves_both(order):
    p, d = Fake("p"), Fake("d")
    p.go.clear()
    d.go.clear()
    async with routed(d, prefill=(p,), order=order) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json={"prompt": "x"}, timeout=0.2)
        await until(lambda: p.left == 1 and d.left == (order == "decode-first"))
        p.go.set()
        d.play = "hang"
        d.go.set()
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break
        await until(lambda: d.left == (2 if order == "decode-first" else 1))


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_first(stream):
    p, d = Fake("p"), Fake("d")
    body = {"prompt": "x", "stream": stream}
    async with routed(d, prefill=(p,), order="decode-first") as client:
        answer = await client.post("/v1/completions", json=body)
    assert '"d"' in answer.text
    told, pushed = d.asked[0]["kv_transfer_params"], p.asked[0]["kv_transfer_params"]
    assert told["do_remote_prefill"] and told["push"] and pushed["do_remote_decode"] and pushed["push"]
    assert told["remote_request_id"] == pushed["remote_request_id"]
    assert (pushed["remote_host"], pushed["remote_port"]) == ("h", 7)


async def test_overlapped():
    p, d = Fake("p"), Fake("d")
    async with routed(d, prefill=(p,), overlap=True) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert '"d"' in answer.text
    told, computes = d.asked[0]["kv_transfer_params"], p.asked[0]["kv_transfer_params"]
    assert told["do_remote_prefill"] and told["follow"] and computes["do_remote_decode"] and computes["follow"]
    assert told["remote_request_id"] == computes["remote_request_id"]
    assert (told["remote_host"], told["remote_port"]) == ("h", 7)
    assert computes["remote_host"] is None


def test_overlap_is_an_order_of_pulls():
    given = merged(prefill=("http://p",), decode=("http://d",), order="decode-first", overlap=True)
    with pytest.raises(ConfigError, match="overlap"):
        read_config(given)


@pytest.mark.parametrize("way", [{"order": "decode-first"}, {"overlap": True}])
async def test_at_once_where_nobody_computes(way):
    p, d = Fake("p"), Fake("d")
    p.play = "die"
    d.go.clear()
    body = {"prompt": "x"}
    async with routed(d, prefill=(p,), **way) as client:
        asking = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: d.left == 1)
        d.go.set()
        assert (await asking).json()["from"] == "d"
        counted = whole_requests((await client.get("/metrics")).text)
    assert d.asked[1] == body
    assert counted == {"push_failed": 1}


@pytest.mark.parametrize(("way", "asked"), [({"order": "decode-first"}, "d"), ({"overlap": True}, "p")])
@pytest.mark.parametrize("connector", [("file", {"path": "/p"}), ("tcp", {}), (None, {})])
async def test_at_once_through_a_pool_is_refused_with_the_reason(way, asked, connector):
    p, d = Fake("p"), Fake("d")
    (p if asked == "p" else d).connector = connector
    for one in (p, d):
        await one.start()
    given = merged(prefill=(p.url,), decode=(d.url,), **way)
    router = Router(read_config(given), given)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ConfigError, match="in a pool") as caught:
        await router.run(listener)
    assert (p if asked == "p" else d).url in str(caught.value) and str(connector[0] or "no KV") in str(caught.value)
    for one in (p, d):
        await one.stop()


@pytest.mark.parametrize("connector", [("file", {"path": "/p"}), ("redis", {})])
async def test_a_server_that_turns_out_to_have_a_pool_computes_the_prompt_itself(connector):
    """It was not there when the router started."""
    p, d = Fake("p"), Fake("d")
    d.connector = connector
    async with routed(d, prefill=(p,), order="decode-first") as client:
        for _ in range(3):
            answer = await client.post("/v1/completions", json={"prompt": "x"})
        counted = whole_requests((await client.get("/metrics")).text)
    assert answer.json()["from"] == "d" and p.asked == [] and counted == {"no_place": 3}
    assert d.looked_at == 1, "it is asked once where it listens"


@pytest.mark.parametrize("budget", [{}, {"budget_tokens": None}, {"budget_tokens": 2000}])
def test_a_prompt_whose_answer_is_thought_over_is_taken_by_who_computes_it(budget):
    """A budget has to be below max_tokens."""
    asked = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4000,
        "thinking": {"type": "enabled", **budget},
    }
    if not any(budget.values()):
        asked["thinking"]["type"] = "disabled"
    body = MessagesBody(**for_prefill("/v1/messages", {"model": "m", **asked}))
    assert body.thinking.type == asked["thinking"]["type"] and body.max_tokens <= 2
