"""Sampling defaults of the model and of the operator, over every route that writes text, and offline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx

from engine import LLM, SamplingParams
from engine_tiny import model_folder

from .conftest import Server

USER: Any = [{"role": "user", "content": "Tell me a story."}]


def test_every_route_has_them() -> None:
    override = '{"temperature": 0, "max_new_tokens": 6}'
    flags = ["--max-model-len", "256", "--api-workers", "2", "--verbose", "--override-generation-config", override]
    server = Server("tiny", *flags)
    try:

        def post(path: str, **body: Any) -> Any:
            # A connection each, so that either of the two processes answers some.
            answer = httpx.post(server.address + path, json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()

        (card,) = httpx.get(server.address + "/v1/models", timeout=60).json()["data"]
        assert card["default_sampling_params"] == {"temperature": 0, "max_tokens": 6}
        on: Any = {"ignore_eos": True}
        greedy = post("/v1/completions", prompt="Once", temperature=0, max_tokens=6, **on)["choices"][0]["text"]
        for _ in range(6):
            answer = post("/v1/completions", prompt="Once", **on)
            assert answer["choices"][0]["text"] == greedy, "the route's 16 tokens are limited, too"
        hot: Any = {"prompt": "Once", "temperature": 1.9, "max_tokens": 6, **on}
        assert len({post("/v1/completions", seed=seed, **hot)["choices"][0]["text"] for seed in range(4)}) > 1
        for asked, count in ((None, 6), (50, 6), (2, 2)):
            usage = post("/v1/chat/completions", messages=USER, max_tokens=asked, **on)["usage"]
            assert usage["completion_tokens"] == count
        told = post("/v1/responses", input="Hi")
        assert (told["temperature"], told["usage"]["output_tokens"] <= 6) == (0, True)
        assert post("/v1/responses", input="Hi", temperature=0.7)["temperature"] == 0.7
        message = post("/v1/messages", messages=USER, max_tokens=50)
        assert message["stop_reason"] in ("max_tokens", "end_turn") and message["usage"]["output_tokens"] <= 6
    finally:
        assert server.stop() == 0, "".join(server.lines)
    said = "temperature 0, max_tokens 6, by --override-generation-config; no request gets more than 6 tokens"
    assert any(said in line for line in server.lines)


def test_offline(tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder(), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0, "max_new_tokens": 3}))
    llm = LLM(folder, max_model_len=64, num_kv_pages=100)
    try:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens, params.top_p) == (0, 3, 1.0)
        params.max_tokens = 5
        assert llm.get_default_sampling_params().max_tokens == 3
        own = SamplingParams(max_tokens=8, ignore_eos=True)
        one, other, free = (
            llm.generate("Once", params, use_tqdm=False)[0].outputs[0]
            for params in (None, SamplingParams(temperature=0, max_tokens=3), own)
        )
        assert one.token_ids == other.token_ids
        assert len(free.token_ids) == 8, "parameters that are passed are taken as they are"
        assert own == SamplingParams(max_tokens=8, ignore_eos=True)
    finally:
        llm.shutdown()
