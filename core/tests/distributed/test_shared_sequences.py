"""Engines whose ranks share the tokens of each sequence (context parallel): the tokens of one rank, with half of the
keys and values on each of two."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tokens import assert_equal, generate
from thread_ranks import registry

from engine import SamplingParams
from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.llm import LLMEngine
from engine.types.errors import ConfigError, KVCacheTooSmallError


@pytest.mark.parametrize(
    ("architecture", "features", "settings"),
    [
        ("DeepseekV3ForCausalLM", {"rope": "yarn-mscale", "bias": True}, {}),
        ("Qwen2ForCausalLM", {"sliding": 6, "tie": True}, {"num_kv_pages": 18}),
        pytest.param("LlamaForCausalLM", {"kv_heads": 2}, {"dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", {"kv_heads": 2}, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_launched_engines_share_sequences(
    checkpoints: Any, architecture: str, features: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Layers with latents and with windows; in shorter types, where `auto` takes other drivers, nothing is broken."""
    folder = checkpoints(architecture, **features)
    found = generate(folder, 1, executor="threads", context_parallel_size=2, **settings)
    if settings.get("dtype") is None:
        return assert_equal(found, generate(folder, 1, **settings))
    assert all(len(tokens) == 14 for tokens, _ in found)


def one_prompt(folder: Path, num_tokens: int, **settings: Any) -> tuple[list[int], int]:
    """What follows a prompt, and the pages of the cache that had room for it on each rank."""
    config = EngineConfig(**{"model": str(folder), "dtype": "float64", "max_num_seqs": 1, "block_size": 16, **settings})
    engine = LLMEngine.from_engine_args(config, registry())
    try:
        prompt = np.random.default_rng(num_tokens).integers(0, 256, num_tokens).tolist()
        engine.add_request("0", {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=4))
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                tokens = list(output.outputs[0].token_ids)
        return tokens, engine.client.worker.num_pages  # type: ignore[attr-defined]
    finally:
        engine.shutdown()


def test_each_rank_keeps_its_part(checkpoints: Any) -> None:
    """Two have room for twice the tokens in as many pages each."""
    folder = checkpoints("LlamaForCausalLM", kv_heads=2)
    settings = {"num_kv_pages": 4, "max_num_batched_tokens": 24}
    expected, _ = one_prompt(folder, 90, **settings | {"num_kv_pages": 7})
    assert one_prompt(folder, 90, executor="threads", context_parallel_size=2, **settings) == (expected, 4)
    with pytest.raises(KVCacheTooSmallError):
        one_prompt(folder, 90, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "dtype"), [(128 * 1024, "float32"), (16 * 1024, "float64")])
def test_a_long_prompt(checkpoints: Any, tmp_path: Path, num_tokens: int, dtype: str) -> None:
    """In chunks, in half the pages on each of two ranks."""
    folder = shutil.copytree(checkpoints("LlamaForCausalLM", layers=1, heads=1, kv_heads=1), tmp_path / "long")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1 << 18}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {
        "max_num_batched_tokens": 2048, "block_size": 64, "max_model_len": num_tokens + 1024, "dtype": dtype,
    }  # fmt: skip
    pages = num_tokens // 64 + 2  # one for what is drawn, and the one that nobody owns
    expected, _ = one_prompt(folder, num_tokens, num_kv_pages=pages, **settings)
    half = num_tokens // 128 + 2
    found = one_prompt(folder, num_tokens, num_kv_pages=half, executor="threads", context_parallel_size=2, **settings)
    assert found == (expected, half) and len(expected) == 4


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (("MistralForCausalLM", {"sliding": 7}), {}, "layers that see 7 tokens, which do not divide by 2"),
        (None, {"drafter": "medusa", "drafter.tree": "[[0], [1]]"}, "a rank has some of a tree's nodes"),
        (None, {"kv_connector": "file", "kv_connector.path": os.devnull}, "connector 'file' does not tell apart"),
    ],
)  # fmt: skip
def test_what_cannot_share_sequences_is_refused(
    checkpoints: Any, model: tuple[str, dict[str, Any]] | None, settings: dict[str, Any], says: str
) -> None:
    name = "tiny" if model is None else str(checkpoints(model[0], **model[1]))
    with pytest.raises(ConfigError, match=says):
        launch(EngineConfig(model=name, context_parallel_size=2, **settings))
