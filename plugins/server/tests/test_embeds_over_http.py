"""Embeddings in place of tokens over HTTP, and folders of prompt tuning as models of the server."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save, save_file

from engine.embedding import EngineConfig
from engine.types.errors import ConfigError
from engine_kit.async_llm import AsyncLLM
from engine_server.adapters import ServedAdapters
from engine_server.app import create_app
from engine_server.config import ServerConfig
from engine_server.errors import APIError
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase
from engine_server.openai.bodies import CompletionBody

SETTINGS: dict[str, Any] = {
    "dtype": "float64", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 128, "num_kv_pages": 300,
    "served_model_name": "base", "enable_prompt_embeds": True,
}  # fmt: skip
BODY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
IDS, VIRTUAL = [5, 9, 17, 33, 8, 4], [40, 41, 42]


def write_prompt_adapter(folder: Path, vectors: torch.Tensor, name: str = "prompt_embeddings", **config: Any) -> str:
    """The two files of PEFT's prompt tuning."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        "peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": len(vectors),
        "token_dim": vectors.shape[1], "num_transformer_submodules": 1, "prompt_tuning_init": "RANDOM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    save_file({name: vectors.contiguous()}, folder / "adapter_model.safetensors")
    return str(folder)


def encoded(vectors: torch.Tensor) -> str:
    return base64.b64encode(save({"x": vectors.contiguous()})).decode()


def embeddings(llm: AsyncLLM) -> torch.Tensor:
    (file,) = llm.plan.files.weights
    return load_file(file)["model.embed_tokens.weight"]


def test_a_server(tmp_path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(EngineConfig(**SETTINGS))
        try:
            table = embeddings(llm)
            path = write_prompt_adapter(tmp_path / "soft", table[VIRTUAL])
            _refuse(llm, tmp_path, table)
            settings = ServerConfig(prompt_adapters=(f"soft={path}",))
            await llm.start(lambda error: None)
            lifecycle = Lifecycle()
            lifecycle.phase = Phase.SERVING
            app = create_app(llm, settings, lifecycle, KeyRing())
            adapters = ServedAdapters(llm, settings)
            adapters.folder = str(tmp_path)
            with pytest.raises(APIError, match="--prompt-adapters: it stays"):
                await adapters.unload("soft")
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x/v1") as client:
                await _embeds(client, table)
                await _adapter(client, path, table)
        finally:
            llm.shutdown()

    asyncio.run(main())


async def _embeds(client: httpx.AsyncClient, table: torch.Tensor) -> None:
    async def post(**body: Any) -> httpx.Response:
        return await client.post("/completions", json=BODY | body)

    async def tokens(**body: Any) -> list[list[int]]:
        answer = await post(**body)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["token_ids"] for choice in choices]

    first, second = await tokens(prompt=[IDS, IDS[::-1]])
    mine, others = encoded(table[IDS]), encoded(table[IDS[::-1]].float())
    assert await tokens(prompt_embeds=mine) == [first]
    assert await tokens(prompt_embeds=[mine, others]) == [first, second]
    assert await tokens(prompt_embeds=others, prompt=[IDS]) == [second, first], "embeddings are answered first"
    assert await tokens(prompt_embeds=mine, n=2) == [first, first]
    answer = (await post(prompt_embeds=mine)).json()
    assert answer["usage"]["prompt_tokens"] == len(IDS) and answer["choices"][0]["prompt_token_ids"] == [0] * len(IDS)
    streamed = await post(prompt_embeds=[mine, others], stream=True)
    found: list[list[int]] = [[], []]
    for line in streamed.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] += choice["token_ids"]
    assert found == [first, second]
    size = table.shape[1]
    for param, body in (
        ("prompt_embeds", {"prompt_embeds": "gAR9"}),
        ("prompt_embeds", {"prompt_embeds": "gAR9", "prompt": [IDS]}),
        ("prompt_embeds", {"prompt_embeds": [mine, encoded(table[IDS][:, 1:])]}),
        ("prompt_embeds", {"prompt_embeds": encoded(torch.zeros(128, size, dtype=torch.bfloat16))}),
        ("prompt_embeds", {"prompt_embeds": "A" * 4_000_000}),
        ("prompt_embeds", {"prompt_embeds": encoded(torch.full((2, size), torch.nan))}),
        ("prompt_embeds", {"prompt_embeds": encoded(table[IDS].to(torch.int32))}),
        ("prompt_embeds", {"prompt_embeds": 5}),
        (None, {"prompt_embeds": mine, "prompt_logprobs": 1}),
        (None, {"prompt_embeds": mine, "echo": True}),
        (None, {"prompt_embeds": mine, "truncate_prompt_tokens": 1}),
        (None, {"prompt_embeds": mine, "add_special_tokens": False}),
        ("prompt", {"prompt_embeds": []}),
        ("prompt", {}),
        ("prompt", {"prompt_embeds": [mine] * 600, "prompt": [IDS] * 600}),
    ):
        answer = await post(**body)
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert param is None or (error["param"] or "").partition(".")[0] == param, error
    assert await tokens(prompt_embeds=mine) == [first]


async def _adapter(client: httpx.AsyncClient, path: str, table: torch.Tensor) -> None:
    async def post(route: str, **body: Any) -> Any:
        answer = await client.post(route, json=BODY | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    listed = {one["id"]: (one["parent"], one["root"]) for one in (await client.get("/models")).json()["data"]}
    assert listed == {"base": (None, "base"), "soft": ("base", path)}
    expected = (await post("/completions", prompt=[*VIRTUAL, *IDS]))["choices"][0]["token_ids"]
    answer = await post("/completions", model="soft", prompt=IDS, echo=True)
    assert answer["model"] == "soft" and answer["choices"][0]["token_ids"] == expected
    plain = await post("/completions", model="base", prompt=IDS, echo=True)
    assert plain["choices"][0]["token_ids"] != expected
    echoed = [one["choices"][0]["text"][:9] for one in (answer, plain)]
    assert echoed[0] == echoed[1], "what is echoed is the prompt that was sent"
    assert answer["usage"]["prompt_tokens"] == len(VIRTUAL) + len(IDS)
    again = await post("/completions", model="soft", prompt=IDS)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(VIRTUAL) + len(IDS) - 1
    chat = await post("/chat/completions", model="soft", messages=[{"role": "user", "content": "Hello"}])
    bare = await post("/chat/completions", model="base", messages=[{"role": "user", "content": "Hello"}])
    assert chat["usage"]["prompt_tokens"] == bare["usage"]["prompt_tokens"] + len(VIRTUAL)
    for model in ("base", "soft"):
        says = {"model": model, "messages": [{"role": "user", "content": "Hello " * 10}]}
        counted = (await client.post("/messages/count_tokens", json=says)).json()["input_tokens"]
        usage = (await client.post("/messages", json={**says, "max_tokens": 1})).json()["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    both = BODY | {"model": "soft", "prompt_embeds": encoded(table[IDS])}
    answer = await client.post("/completions", json=both)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_embeds"


def _refuse(llm: AsyncLLM, folder: Path, table: torch.Tensor) -> None:
    """Folders that are none, named, before anything is served."""
    vectors = table[VIRTUAL]
    bad: dict[str, tuple[str, str]] = {
        "prefix": (write_prompt_adapter(folder / "prefix", vectors, peft_type="PREFIX_TUNING"), "keys and values"),
        "p": (write_prompt_adapter(folder / "p", vectors, peft_type="P_TUNING"), "network"),
        "lora": (write_prompt_adapter(folder / "lora", vectors, peft_type="LORA"), "--lora-modules"),
        "list": (write_prompt_adapter(folder / "list", vectors, peft_type=["LORA"]), "PROMPT_TUNING is served"),
        "task": (write_prompt_adapter(folder / "task", vectors, task_type="SEQ_2_SEQ_LM"), "CAUSAL_LM"),
        "parts": (write_prompt_adapter(folder / "parts", vectors, num_transformer_submodules=2), "2 parts"),
        "count": (write_prompt_adapter(folder / "count", vectors, num_virtual_tokens=4), "4 virtual tokens"),
        "name": (write_prompt_adapter(folder / "name", vectors, "base_model.prompt"), "base_model.prompt"),
        "size": (write_prompt_adapter(folder / "size", vectors[:, 1:]), "elements"),
        "long": (write_prompt_adapter(folder / "long", table[:200]), "128 tokens"),
        "nowhere": (str(folder / "nowhere"), "no such folder"),
    }
    for name in ("config", "weights", "pickled", "json"):
        bad[name] = write_prompt_adapter(folder / name, vectors), {"pickled": "pickled", "json": "JSON"}.get(name, name)
    (folder / "config" / "adapter_config.json").unlink()
    (folder / "json" / "adapter_config.json").write_text("{")
    bad["config"] = bad["config"][0], "No such file"
    (folder / "weights" / "adapter_model.safetensors").write_bytes(b"\x80\x04weights")
    bad["weights"] = bad["weights"][0], "safetensors"
    (folder / "pickled" / "adapter_model.safetensors").rename(folder / "pickled" / "adapter_model.bin")
    for name, (path, found) in bad.items():
        with pytest.raises(ConfigError, match=f"prompt_adapters: {name}=.*{found}"):
            ServedAdapters(llm, ServerConfig(prompt_adapters=(f"{name}={path}",)))
    with pytest.raises(ConfigError, match="another model has this name"):
        ServedAdapters(llm, ServerConfig(prompt_adapters=("base=/x",)))
    with pytest.raises(ConfigError, match="prompt_adapters=x"):
        ServedAdapters(llm, ServerConfig(prompt_adapters=("x",)))


def test_an_empty_text_is_a_prompt() -> None:
    """Beside embeddings too: what is said of texts is not refused."""
    given = {"prompt_embeds": "x", "truncate_prompt_tokens": 1}
    CompletionBody.model_validate({**given, "prompt": ""})
    with pytest.raises(ValidationError, match="truncate_prompt_tokens is for texts"):
        CompletionBody.model_validate(given)


def test_an_engine_that_takes_none(tmp_path: Path) -> None:
    llm = AsyncLLM(EngineConfig(**{**SETTINGS, "enable_prompt_embeds": False}))
    try:
        with pytest.raises(ConfigError, match="--enable-prompt-embeds"):
            ServedAdapters(llm, ServerConfig(prompt_adapters=(f"soft={tmp_path}",)))
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_what_peft_saves(tmp_path: Path) -> None:
    """Greedy tokens of PEFT's own model with its prompt tuning."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from engine import LLM, SamplingParams
    from engine_kit.prompt_adapters import read_prompt_adapter

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    model.save_pretrained(tmp_path / "model")
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    tuned.double()
    tuned.save_pretrained(tmp_path / "soft")
    ids = torch.tensor([IDS])
    expected: list[int] = []
    for _ in range(12):
        with torch.no_grad():
            token = tuned(input_ids=torch.cat([ids, torch.tensor([expected], dtype=torch.long)], 1)).logits[0, -1]
        expected.append(int(token.argmax()))
    tokenizer = Path(__file__).parents[2] / "reference/src/engine_reference/checkpoint_dummy/files"
    settings = {"dtype": "float64", "max_model_len": 128, "num_kv_pages": 64, "tokenizer": str(tokenizer)}
    with LLM(str(tmp_path / "model"), enable_prompt_embeds=True, **settings) as llm:
        assert llm.llm_engine.plan is not None
        vectors = read_prompt_adapter(tmp_path / "soft", llm.llm_engine.plan.model, 128)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_embeds": vectors, "prompt_token_ids": IDS}, params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected
