"""Sampling defaults: which keys of generation_config.json count, what goes before what, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.embedding import EngineConfig
from engine.types.errors import ConfigError
from engine.types.model import CheckpointFiles
from engine.types.params import SamplingDefaults
from engine_kit.generation_config import as_text, read_generation_config, sampling_defaults

OF_THE_MODEL = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": None, "max_new_tokens": 64,
    "eos_token_id": 7, "repetition_penalty": 1.05,
}  # fmt: skip


def read(**settings: Any) -> SamplingDefaults:
    config = EngineConfig(**settings)
    files = CheckpointFiles(name="m", folder="/m", weights=(), config={}, generation_config=OF_THE_MODEL)
    return sampling_defaults(config, read_generation_config(config, files), generates=True)


def test_the_models_own() -> None:
    found = read()
    assert found.params == {"temperature": 0.6, "top_k": 20, "max_tokens": 64, "repetition_penalty": 1.05}
    assert found.max_tokens_limit is None, "the model's makers limit nobody"
    assert as_text(found).endswith("by the model's generation_config.json")
    params = found.sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 1.0, 64)
    assert found.sampling_params() is not params


def test_neutral_ones_and_an_override() -> None:
    assert read(generation_config="engine") == SamplingDefaults() and as_text(SamplingDefaults()) == ""
    override: Any = {"temperature": 0, "top_k": -1, "max_new_tokens": None}
    over = read(override_generation_config=override)
    assert over.params == {"temperature": 0, "repetition_penalty": 1.05} and over.max_tokens_limit is None
    assert "generation_config.json and --override-generation-config" in as_text(over)
    alone = read(generation_config="engine", override_generation_config='{"max_new_tokens": 9}')
    assert (alone.params, alone.max_tokens_limit) == ({"max_tokens": 9}, 9)
    assert as_text(alone) == "max_tokens 9, by --override-generation-config; no request gets more than 9 tokens"


def test_another_folder(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5, "max_new_tokens": 8}')
    found = read(generation_config=tmp_path)
    assert (found.params, found.max_tokens_limit) == ({"top_p": 0.5, "max_tokens": 8}, 8)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"override_generation_config": {"max_tokens": 8}}, "the key 'max_tokens'.*did you mean 'max_new_tokens'"),
        ({"override_generation_config": {"do_sample": True}}, "the key 'do_sample'.*it can set temperature, top_k"),
        ({"override_generation_config": {"top_p": 2}}, r"top_p=2\b.*outside \(0.0, 1.0\].*pass a value in that range"),
        ({"override_generation_config": {"temperature": "hot"}}, "temperature='hot'.*not a number"),
        ({"override_generation_config": "[1]"}, "it is no object.*temperature"),
        ({"generation_config": "vllm"}, "vLLM's name.*pass engine"),
        ({"generation_config": "nowhere"}, "nowhere/generation_config.json: No such file.*pass auto"),
        ({"generation_config": "{tmp_path}"}, "top_k=-5.*set top_k with --override-generation-config"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": -5}))
    if "generation_config" in settings:
        settings = {"generation_config": settings["generation_config"].format(tmp_path=tmp_path)}
    with pytest.raises(ConfigError) as caught:
        read(**settings)
    assert re.search(says, str(caught.value), re.DOTALL), caught.value


def test_one_that_writes_no_text() -> None:
    assert sampling_defaults(EngineConfig(), OF_THE_MODEL, generates=False) == SamplingDefaults()
    with pytest.raises(ConfigError, match="writes no text"):
        sampling_defaults(EngineConfig(override_generation_config={"top_k": 1}), {}, generates=False)
