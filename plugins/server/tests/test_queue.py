"""How many sequences may wait: those that are still being tokenised count; for whom requests retain their KV cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from engine.types.params import SamplingParams
from engine.types.retention import KVRetention
from engine_server.bodies import GeneratingBody
from engine_server.errors import APIError
from engine_server.state import ServerState

NO_ADAPTERS: Any = SimpleNamespace(fields=lambda name: {}, names=())


class Engine:
    """Tokenises when it may; `queue_length` is what was queued."""

    inputs = SimpleNamespace(told_of_requests=False)
    model_names = ("tiny",)

    def __init__(self) -> None:
        self.queue_length = 0
        self.go = asyncio.Event()

    async def submit_all(self, several: Iterable[tuple[Any, SamplingParams, str]], *_: Any) -> list[Any]:
        await self.go.wait()
        asked = [params for _, params, _ in several]
        self.queue_length += sum(params.num_sequences for params in asked)
        return asked


async def test_no_more_come_than_may_while_prompts_are_tokenised() -> None:
    engine, settings = Engine(), SimpleNamespace(max_queue=4, share_prefix_cache=True)
    state = ServerState(engine, NO_ADAPTERS, *([None] * 4))  # type: ignore[arg-type]
    object.__setattr__(state, "settings", settings)
    request: Any = SimpleNamespace(scope={"state": {}})
    body: Any = SimpleNamespace(priority=0, timeout=None, model=None)

    def ask(n: int) -> asyncio.Task[Any]:
        assert state.admit(None) == "tiny"
        return asyncio.create_task(state.submit(request, body, ["a", "b"], [SamplingParams(n=n)] * 2, "r"))

    first, rendered = ask(1), [state.admit(None) for _ in range(3)]
    await asyncio.sleep(0)
    second = ask(1)
    await asyncio.sleep(0)
    with pytest.raises(APIError, match="4 sequences wait"):
        state.admit(None)
    assert rendered  # these were admitted before, and find it full when their prompts are rendered
    with pytest.raises(APIError, match="--max-queue"):
        await state.submit(request, body, ["a"], [SamplingParams()], "r")
    assert engine.queue_length == 0
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert state.admit(None) == "tiny", "who has gone has left the queue"
    engine.go.set()
    assert len(await first) == 2 and engine.queue_length == 2 and not state.preparing


async def test_what_a_client_retains_counts_for_its_api_key() -> None:
    """Whatever salts it makes up, and whether keys share cached pages or not; without keys all clients are one."""
    engine = Engine()
    queued: list[Any] = []

    async def submit_all(several: Iterable[tuple[Any, SamplingParams, str]], *_: Any) -> list[Any]:
        queued.extend(prompt for prompt, _, _ in several)
        return []

    engine.submit_all = submit_all  # type: ignore[method-assign]
    state = ServerState(engine, NO_ADAPTERS, *([None] * 4))  # type: ignore[arg-type]
    body: Any = GeneratingBody.model_validate({"kv_retention": {"pin": True, "session": "a"}})
    for share in (True, False):
        object.__setattr__(state, "settings", SimpleNamespace(max_queue=4, share_prefix_cache=share))
        for noted in ({"cache_salt": "key", "own_salt": "made up"}, {"own_salt": "made up"}, {}):
            await state.generate(SimpleNamespace(scope={"state": noted}), body, ["x"], SamplingParams(), "r")  # type: ignore[arg-type]
    wishes = [KVRetention(**one) for prompt in queued for one in prompt["kv_retention"]]
    assert [wish.key for wish in wishes] == ["key", "", ""] * 2 and all(wish.session == "a" for wish in wishes)
    for field in ("key", "tokens", "hint"):
        with pytest.raises(ValidationError, match=field):
            GeneratingBody.model_validate({"kv_retention": {"pin": True, field: 1}})
