"""Chunks that requests name: where they are set apart, and through the server's own routes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_oracles import DOCUMENTS, QUESTION, SETTINGS

from engine import LLM, SamplingParams
from engine.embedding import EngineConfig
from engine_blend.documents import set_apart
from engine_kit.async_llm import AsyncLLM

pytest.importorskip("engine_server", reason="engine-server is not installed")
from engine_server.app import create_app
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase

SHOWS = "{% for d in documents or [] %}[{{ d.title }}: {{ d.text | trim }}]{% endfor %}{{ messages[-1].content }}"


@pytest.mark.parametrize(
    ("prompt", "documents", "found"),
    [
        ("a one b two", ["one", "two"], "a  |one | b  |two |"),
        ("onetwo", ["one", "two"], " |one |two |"),
        ("a |one |two", ["one"], "a |one |two"),
        ("a one and more", ["one", "one and"], "a  |one and | more"),
        ("one, one", [" one\n"], " |one |,  |one |"),
        (r'{"text": "say \"ä\""}', ['say "ä"'], r'{"text": " |say \"ä\" |"}'),
        ("a (b|c)* d", ["(b|c)*"], "a  |(b|c)* | d"),
        ("nothing", [], "nothing"),
    ],
)
def test_texts_are_set_apart(prompt: str, documents: list[str], found: str) -> None:
    assert set_apart(prompt, documents, " |") == found


@pytest.mark.parametrize(("document", "found"), [("three", "does not stand"), (" ", "is empty")])
def test_texts_that_are_not_there(document: str, found: str) -> None:
    with pytest.raises(ValueError, match=f"document 1 .*{found}"):
        set_apart("one two", ["one", document])


def test_prompts_of_llm() -> None:
    """What is set apart is found in another order."""
    with LLM(**SETTINGS, evictor="cacheblend") as llm:
        for order in (DOCUMENTS, DOCUMENTS[::-1]):
            prompt = set_apart(f"{order[0]} {order[1]} And: {order[2]} {QUESTION}", DOCUMENTS)
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        count = len(llm.get_tokenizer().encode("".join(DOCUMENTS)))
        stats = llm.llm_engine.stats()
        assert stats is not None and count * 0.8 < stats.reused_tokens <= count


class Served:
    """A server without a socket."""

    def __init__(self, llm: AsyncLLM) -> None:
        lifecycle = Lifecycle()
        lifecycle.phase = Phase.SERVING
        app = create_app(llm, ServerConfig(), lifecycle, KeyRing())
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x/v1")

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        answer = await self.client.post(path, json={"model": "tiny", "max_tokens": 2, **body}, headers=headers)
        return answer.status_code, answer.json()

    async def blended(self) -> int:
        """Tokens until now."""
        text = (await self.client.get("http://x/metrics")).text
        lines = [line for line in text.splitlines() if 'source="blended"' in line]
        return int(float(lines[0].split()[-1])) if lines else 0


def serve(test: Any, **settings: Any) -> None:
    async def main() -> None:
        llm = AsyncLLM(EngineConfig(**{**SETTINGS, "served_model_name": "tiny", **settings}))
        try:
            await llm.start(lambda error: None)
            await test(Served(llm))
        finally:
            llm.shutdown()

    asyncio.run(main())


def chat(text: str, documents: list[Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "documents": documents}


async def _chunks(served: Served) -> None:
    """Named in each of the three places, and found in the others; new documents are not."""
    first, second, third = DOCUMENTS
    shown = [{"title": "a", "text": first}, {"title": "b", "text": f" {second}\n"}]
    assert (await served.post("/chat/completions", chat(QUESTION, shown)))[0] == 200
    assert await served.blended() == 0
    assert (await served.post("/chat/completions", chat(QUESTION, [second, first])))[0] == 200
    before = await served.blended()
    assert before > 40
    said = f"Read: {second} -- {first} {QUESTION}"
    assert (await served.post("/chat/completions", chat(said, [first, second])))[0] == 200
    between, before = before, await served.blended()
    assert before > between + 40
    body = {"prompt": f"{third}? {first}! {QUESTION}", "documents": [third, first]}
    assert (await served.post("/completions", body))[0] == 200
    between, before = before, await served.blended()
    assert before > between + 15
    unnamed = {"prompt": f"Well, {first}! {QUESTION}"}
    assert (await served.post("/completions", unnamed, **{"x-engine-documents": "0"}))[0] == 200
    assert await served.blended() == before, "it was not named"


async def _faults(served: Served) -> None:
    prompt: dict[str, Any] = {"prompt": DOCUMENTS[0]}
    for body, found in (
        ({**prompt, "documents": ["elsewhere"]}, "does not stand in the prompt"),
        ({**prompt, "documents": [""]}, "document 0 has no text"),
        ({**prompt, "documents": [7]}, "document 0 has no text"),
        ({**prompt, "documents": "x"}, "it is no list"),
        ({"prompt": [1, 2, 3], "documents": ["x"]}, "token ids"),
    ):
        status, answer = await served.post("/completions", body)
        assert status == 400 and found in answer["error"]["message"], answer
    status, answer = await served.post("/chat/completions", chat(QUESTION, DOCUMENTS[:1]))
    assert status == 400 and "does not show them" in answer["error"]["message"], answer
    assert (await served.post("/completions", prompt))[0] == 200


def test_documents_of_requests(tmp_path: Path) -> None:
    (tmp_path / "shows.jinja").write_text(SHOWS)
    serve(_chunks, evictor="cacheblend", chat_template=str(tmp_path / "shows.jinja"))


def test_what_names_no_documents_is_refused() -> None:
    serve(_faults, evictor="cacheblend")


async def _others(served: Served) -> None:
    assert (await served.post("/completions", {"prompt": "x", "documents": ["x"]}))[0] == 400
    assert (await served.post("/completions", {"prompt": json.dumps("documents")}))[0] == 200


def test_another_evictor_knows_no_documents() -> None:
    """Nothing is left out of a body that nobody heeds."""
    serve(_others)
