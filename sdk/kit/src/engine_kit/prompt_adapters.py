"""Prompt adapters: embeddings, trained for one task, that stand before every prompt (Lester et al. 2021), in folders as
PEFT saves its prompt tuning: `adapter_config.json` and `adapter_model.safetensors`. Without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from engine.types.embeds import PromptEmbeds
from engine.types.errors import InvalidRequestError, shown
from engine.types.model import ModelDescription
from engine.types.params import SamplingParams
from engine_kit.peft_files import CONFIG, WEIGHTS, read_config, read_weights
from engine_kit.prompt_embeds import embeds_of, read_one_tensor

TENSOR = "prompt_embeddings"
_OTHERS: Mapping[str, str] = {
    "PREFIX_TUNING": "it brings keys and values for every layer, which are no embeddings",
    "P_TUNING": "its embeddings are made by a network, which is not computed here",
    "MULTITASK_PROMPT_TUNING": "its embeddings are another's for each task",
    "LORA": "it is served by --lora-modules, with --adapter lora",
}


def read_prompt_adapter(path: str | os.PathLike[str], model: ModelDescription, max_model_len: int) -> PromptEmbeds:
    """The embeddings of an adapter, for `{"prompt_embeds": ..., "prompt": ...}`.

    Args:
        path: the folder.
        model: as the engine runs it, which has to take `prompt_embeds`.
        max_model_len: most tokens of one request.

    Raises InvalidRequestError: it is no folder of a prompt adapter, its files are broken, or it is for another model.
    """
    folder = os.fspath(path)
    refuse = partial(_refusal, folder)
    config, _ = read_config(folder, refuse)
    kind = config.get("peft_type")
    if kind != "PROMPT_TUNING":
        why = _OTHERS.get(kind, "") if isinstance(kind, str) else ""
        raise refuse(f"its peft_type is {shown(kind)}, and PROMPT_TUNING is served" + (why and f": {why}"))
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise refuse(f"its task_type is {shown(task)}, and CAUSAL_LM is served")
    if (parts := config.get("num_transformer_submodules")) not in (None, 1):
        raise refuse(f"it is for {shown(parts)} parts of an encoder-decoder model")
    try:
        name, data = read_one_tensor(read_weights(folder, refuse), model)
        if name != TENSOR:
            raise refuse(f"{WEIGHTS} has the tensor {shown(name)}, not {TENSOR!r}")
        if (count := config.get("num_virtual_tokens")) != len(data):
            raise refuse(f"{CONFIG} says {shown(count)} virtual tokens, {WEIGHTS} has {len(data)}")
        return embeds_of(data, model, max_model_len, SamplingParams())
    except InvalidRequestError as error:
        raise refuse(error.found, error.remedy) from error


def _refusal(folder: str, found: str, remedy: str = "") -> InvalidRequestError:
    remedy = remedy or f"name a folder as PEFT saves prompt tuning, with {CONFIG} and {WEIGHTS}"
    return InvalidRequestError(f"load prompt adapter {shown(folder, 300)}", found, remedy)
