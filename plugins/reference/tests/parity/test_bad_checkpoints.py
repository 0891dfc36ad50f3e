"""Checkpoints that cannot be served, opened through `LLM`: typed errors that say what was found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.types.errors import CheckpointError, ConfigError, EngineError, ModelNotFoundError, UnsupportedModelError


def refused(folder: Path, error: type[EngineError], words: str, **settings: Any) -> None:
    with pytest.raises(error, match=words):
        LLM(model=str(folder), dtype="float32", kv_cache_memory=2**24, **settings).shutdown()


@pytest.fixture
def folder(checkpoints: Any, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(checkpoints("LlamaForCausalLM"), tmp_path / "model"))


def change(folder: Path, **keys: Any) -> None:
    """Set keys of config.json; None as value stays null."""
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


def test_truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(folder, CheckpointError, r"model\.safetensors.*truncated")


def test_unknown_folder(folder: Path) -> None:
    refused(folder.parent / "modell", ModelNotFoundError, f"did you mean {folder}")


def test_unknown_architecture(folder: Path) -> None:
    change(folder, architectures=["BambooForCausalLM"])
    refused(folder, UnsupportedModelError, "BambooForCausalLM.*engine-transformers.*no decoder 'BambooForCausalLM'")


def test_unsupported_feature(folder: Path) -> None:
    """By the driver of the name; where nobody names it, the one for any architecture is asked too."""
    change(folder, hidden_act="gelu")
    refused(folder, EngineError, "hidden_act 'gelu'", model_impl="LlamaForCausalLM")
    change(folder, hidden_act="silu", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    refused(folder, EngineError, "longrope")


def test_config_and_weights_differ(folder: Path) -> None:
    change(folder, num_hidden_layers=3, intermediate_size=96)
    refused(folder, CheckpointError, r"9 missing: model\.layers\.2.*for \[96, 64\]")


def test_missing_key(folder: Path) -> None:
    change(folder, vocab_size=None)
    refused(folder, EngineError, "'vocab_size'.*missing")


def test_dynamic_beyond_the_original_length(checkpoints: Any) -> None:
    refused(checkpoints("LlamaForCausalLM", rope="dynamic"), ConfigError, "512.*256", max_model_len=512)
