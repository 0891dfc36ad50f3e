"""The chat template is rendered once a request, whatever the route and however the answer goes out."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jinja2
import pytest

from engine.embedding import EngineConfig
from engine_kit.async_llm import AsyncLLM
from engine_server.app import create_app
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase

SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
BEGUN = [*SAID, {"role": "assistant", "content": "Once"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"messages": SAID}),
    "streamed": ("/chat/completions", {"messages": SAID, "stream": True, "stream_options": {"include_usage": True}}),
    "several": ("/chat/completions", {"messages": SAID, "n": 3, "temperature": 1.0}),
    "logprobs": ("/chat/completions", {"messages": SAID, "logprobs": True, "top_logprobs": 2}),
    "schema": ("/chat/completions", {"messages": SAID, "response_format": {"type": "json_object"}}),
    "continued": (
        "/chat/completions", {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
    ),
    "variables": ("/chat/completions", {"messages": SAID, "chat_template_kwargs": {"mood": "glad"}}),
    "responses": ("/responses", {"input": "Hello", "max_output_tokens": 16}),
    "messages": ("/messages", {"messages": SAID[1:], "system": "Be brief."}),
    "messages streamed": ("/messages", {"messages": SAID[1:], "stream": True}),
}  # fmt: skip


def test_each_request_renders_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[jinja2.Template] = []
    render = jinja2.Template.render

    def counted(self: jinja2.Template, *args: Any, **kwargs: Any) -> str:
        rendered.append(self)
        return render(self, *args, **kwargs)

    async def main() -> dict[str, int]:
        llm = AsyncLLM(EngineConfig(max_num_seqs=8, max_model_len=256, num_kv_pages=300, served_model_name="m"))
        try:
            await llm.start(lambda error: None)
            lifecycle = Lifecycle()
            lifecycle.phase = Phase.SERVING
            app = create_app(llm, ServerConfig(), lifecycle, KeyRing())
            monkeypatch.setattr(jinja2.Template, "render", counted)
            counts = {}
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x/v1") as client:
                for name, (path, body) in REQUESTS.items():
                    tokens = {} if "max_output_tokens" in body else {"max_tokens": 4}
                    for _ in range(2):  # what is done once for all is done by the second
                        rendered.clear()
                        answer = await client.post(path, json={"model": "m"} | tokens | body)
                        assert answer.status_code == 200, (name, answer.text)
                        counts[name] = len(rendered)
            return counts
        finally:
            llm.shutdown()

    assert asyncio.run(main()) == dict.fromkeys(REQUESTS, 1)
