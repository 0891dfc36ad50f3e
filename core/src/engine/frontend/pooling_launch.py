"""What an engine is for, decided at start: to generate text, or to pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.frontend.sentence_transformers import read_pooler
from engine.types.errors import ConfigError
from engine.types.model import CheckpointFiles, ModelDescription

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig


def decide_runner(config: EngineConfig, files: CheckpointFiles, model: ModelDescription) -> ModelDescription:
    """The description with `generates` and `pooler` as this engine is to run it.

    `runner="auto"` pools where the model cannot generate, or where the files of sentence-transformers lie beside it.

    Raises:
        ConfigError: the model cannot do what `runner` asks, or another setting contradicts it.
        CheckpointError, UnsupportedModelError: of the files of sentence-transformers.
    """
    if config.runner == "generate":
        if not model.generates:
            raise ConfigError(
                f"runner=generate with {model.architecture}",
                "it has no logits over the vocabulary",
                "leave runner out, or use a model that generates",
            )
        return model
    found = None
    if not model.pooler.num_labels:
        found = read_pooler(Path(files.folder), model.pooler)
    if model.generates and config.runner == "auto" and found is None:
        return model
    if config.asked("drafter") is not None:
        raise ConfigError(
            f"drafter={config.asked('drafter')} with an engine that pools", "it draws no token", "leave it out"
        )
    return msgspec.structs.replace(model, generates=False, pooler=found or model.pooler)


def check_whole_prompts(model: ModelDescription, max_model_len: int, config: EngineConfig) -> None:
    """Raise ConfigError where a prompt that must be computed in one step might not fit one."""
    if not model.whole_prompts:
        return
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        tokens = getattr(config, name)
        if 0 < tokens < max_model_len:
            raise ConfigError(
                f"{name}={tokens} with {model.architecture}",
                f"each of its tokens sees all others, so a prompt of up to {max_model_len} tokens is one step's",
                f"set {name} to {max_model_len} or more, or max_model_len to less",
            )
