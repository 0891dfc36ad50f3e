"""Prompt adapters: embeddings, trained for one task, that stand before every prompt (Lester et al. 2021), in folders as
PEFT saves its prompt tuning: `adapter_config.json` and `adapter_model.safetensors`. Without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from engine.types.embeds import PromptEmbeds
from engine.types.errors import InvalidRequestError, shown
from engine.types.model import ModelDescription
from engine.types.params import SamplingParams
from engine_kit.prompt_embeds import embeds_of, read_one_tensor

CONFIG, WEIGHTS, TENSOR = "adapter_config.json", "adapter_model.safetensors", "prompt_embeddings"
_OTHERS: Mapping[str, str] = {
    "PREFIX_TUNING": "it brings keys and values for every layer, which are no embeddings",
    "P_TUNING": "its embeddings are made by a network, which is not computed here",
    "MULTITASK_PROMPT_TUNING": "its embeddings are another's for each task",
    "LORA": "it is served by --lora-modules, with --adapter lora",
}
_MOST = 1 << 30
"""Bytes of a file that is read."""


def read_prompt_adapter(path: str | os.PathLike[str], model: ModelDescription, max_model_len: int) -> PromptEmbeds:
    """The embeddings of an adapter, for `{"prompt_embeds": ..., "prompt": ...}`.

    Args:
        path: the folder.
        model: as the engine runs it, which has to take `prompt_embeds`.
        max_model_len: most tokens of one request.

    Raises InvalidRequestError: it is no folder of a prompt adapter, its files are broken, or it is for another model.
    """
    folder = os.fspath(path)
    config = _config(folder)
    kind = config.get("peft_type")
    if kind != "PROMPT_TUNING":
        why = _OTHERS.get(kind, "") if isinstance(kind, str) else ""
        raise _refusal(folder, f"its peft_type is {shown(kind)}, and PROMPT_TUNING is served" + (why and f": {why}"))
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise _refusal(folder, f"its task_type is {shown(task)}, and CAUSAL_LM is served")
    if (parts := config.get("num_transformer_submodules")) not in (None, 1):
        raise _refusal(folder, f"it is for {shown(parts)} parts of an encoder-decoder model")
    try:
        name, data = read_one_tensor(_content(folder, WEIGHTS), model)
        if name != TENSOR:
            raise _refusal(folder, f"{WEIGHTS} has the tensor {shown(name)}, not {TENSOR!r}")
        if (count := config.get("num_virtual_tokens")) != len(data):
            raise _refusal(folder, f"{CONFIG} says {shown(count)} virtual tokens, {WEIGHTS} has {len(data)}")
        return embeds_of(data, model, max_model_len, SamplingParams())
    except InvalidRequestError as error:
        raise _refusal(folder, error.found, error.remedy) from error


def _config(folder: str) -> dict[str, Any]:
    if not os.path.isdir(folder):
        raise _refusal(folder, "there is no such folder")
    try:
        config = json.loads(_content(folder, CONFIG))
    except (ValueError, RecursionError) as error:
        raise _refusal(folder, f"{CONFIG} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise _refusal(folder, f"{CONFIG} holds {shown(config)}, not an object")
    return config


def _content(folder: str, name: str) -> bytes:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read(_MOST)
    except OSError as error:
        found = f"{name}: {error.strerror or error}"
        if name == WEIGHTS and os.path.exists(os.path.join(folder, "adapter_model.bin")):
            found += "; adapter_model.bin is pickled, and reading it would run whatever code is in it"
        raise _refusal(folder, found) from error
    return content


def _refusal(folder: str, found: str, remedy: str = "") -> InvalidRequestError:
    remedy = remedy or f"name a folder as PEFT saves prompt tuning, with {CONFIG} and {WEIGHTS}"
    return InvalidRequestError(f"load prompt adapter {shown(folder, 300)}", found, remedy)
