"""Adapters as models of the server, loaded and unloaded while it serves, by its own routes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from small_adapters import products, write_adapter, write_model
from test_adapted_engine import ADAPTED, SETTINGS, generated
from test_tokenizers import write_tokenizer

from engine.embedding import EngineConfig
from engine.types.errors import ConfigError
from engine_kit.async_llm import AsyncLLM

pytest.importorskip("engine_server", reason="engine-server is not installed")
from engine_server.adapters import ServedAdapters, modules_of
from engine_server.app import create_app
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase

SAYS = {"messages": [{"role": "user", "content": "AB"}]}
BODY = {"prompt": [5, 9, 17, 33], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["a=/x,b=/y/z"], {"a": "/x", "b": "/y/z"}),
        (["a=/x", "b=/y,with/comma"], {"a": "/x", "b": "/y,with/comma"}),
        (['{"name": "a", "path": "/x"}'], {"a": "/x"}),
    ],
)
def test_modules_are_read_as_vllm_has_them(given: list[str], found: dict[str, str]) -> None:
    assert modules_of(given) == found


@pytest.mark.parametrize(
    "given",
    [["a"], ["=x"], ["a=/x,a=/y"], ['{"name": "a"}'], ["{"], ['{"name": "a", "path": "/x", "base_model_name": "m"}']],
)
def test_modules_that_are_none(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="lora_modules="):
        modules_of(given)


def test_a_server_with_adapters(tmp_path: Path) -> None:
    """Listed with their parent, computed as they are, loaded from one folder alone, replaced, unloaded."""
    model = write_model(tmp_path / "model")
    fixed = write_adapter(tmp_path / "fixed", 1)
    write_tokenizer(fixed)
    inside = write_adapter(tmp_path / "allowed" / "inside", 2)
    write_tokenizer(write_adapter(tmp_path / "allowed" / "more", 3), more=2)
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "fixed")
    templates = Path(write_adapter(tmp_path / "allowed" / "templates", 4)) / "additional_chat_templates"
    templates.mkdir()
    (templates / "other.jinja").symlink_to("/etc/hostname")
    (tmp_path / "allowed" / "linked").mkdir()
    for file in (tmp_path / "fixed").iterdir():
        (tmp_path / "allowed" / "linked" / file.name).symlink_to(file)
    expected = {}
    for name, path in (("fixed", fixed), ("later", inside)):
        merged = write_model(tmp_path / f"merged-{name}", products(path, 2.0))
        expected[name] = generated(merged, SETTINGS)[0][:8]
    settings = ServerConfig(lora_modules=(f"fixed={fixed}",), lora_dir=str(tmp_path / "allowed"))

    async def main() -> None:
        llm = AsyncLLM(EngineConfig(model=model, served_model_name="base", **ADAPTED))
        try:
            adapters = ServedAdapters(llm, settings)
            await llm.start(lambda error: None)
            await adapters.begin()
            lifecycle = Lifecycle()
            lifecycle.phase = Phase.SERVING
            app = create_app(llm, settings, lifecycle, KeyRing(), adapters=adapters)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x/v1") as client:
                await _talk(client, expected)
        finally:
            llm.shutdown()

    asyncio.run(main())


async def _talk(client: httpx.AsyncClient, expected: dict[str, list[int]]) -> None:
    async def post(path: str, **body: Any) -> httpx.Response:
        return await client.post(path, json=body)

    async def tokens(model: str) -> list[int]:
        answer = await post("/completions", model=model, **BODY)
        assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    listed = {one["id"]: one["parent"] for one in (await client.get("/models")).json()["data"]}
    assert listed == {"base": None, "fixed": "base"}
    assert await tokens("fixed") == expected["fixed"] != await tokens("base")
    read = {name: (await client.post("http://x/tokenize", json={"model": name, **SAYS})).json() for name in listed}
    assert read["base"]["tokens"] != read["fixed"]["tokens"] and len(read["fixed"]["tokens"]) == len("<AB>")
    text = {"model": "fixed", "tokens": read["fixed"]["tokens"]}
    assert (await client.post("http://x/detokenize", json=text)).json()["prompt"] == "<AB>"
    said = await post("/chat/completions", model="fixed", max_tokens=1, **SAYS)
    assert said.json()["usage"]["prompt_tokens"] == len("<AB>"), said.text
    assert (await post("/completions", model="later", **BODY)).status_code == 404
    assert (await post("/load_lora_adapter", lora_name="later", lora_path="inside")).status_code == 200
    assert await tokens("later") == expected["later"]
    for path in ("link", "linked", "../fixed", "/etc", "nowhere", "a\0b", "more", "templates"):
        answer = await post("/load_lora_adapter", lora_name="other", lora_path=path)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_path", answer.text
    for name in ("later", "base"):
        answer = await post("/load_lora_adapter", lora_name=name, lora_path="inside")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_name", answer.text
    assert (
        await post("/load_lora_adapter", lora_name="later", lora_path="inside", load_inplace=True)
    ).status_code == 200
    for change in (
        post("/unload_lora_adapter", lora_name="fixed"),
        post("/load_lora_adapter", lora_name="fixed", lora_path="inside", load_inplace=True),
    ):
        assert (await change).status_code == 403, "what the operator named stays"
    assert (await post("/unload_lora_adapter", lora_name="later")).status_code == 200
    assert (await post("/unload_lora_adapter", lora_name="later")).status_code == 404
    assert (await post("/completions", model="later", **BODY)).status_code == 404
    assert await tokens("fixed") == expected["fixed"]
