"""The files of an adapter as PEFT saves it: `adapter_config.json` and `adapter_model.safetensors`. Without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from engine.types.errors import InvalidRequestError, shown

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
REMEDY = f"name a folder as PEFT saves it, with {CONFIG} and {WEIGHTS}"
_MOST_CONFIG, _MOST_WEIGHTS = 1 << 24, 1 << 30
"""Bytes that are read."""
Refuse = Callable[[str, str], InvalidRequestError]
"""What was found and what to do -> the error to raise."""


def read_config(folder: str, refuse: Refuse) -> tuple[dict[str, Any], bytes]:
    """What adapter_config.json says, and its bytes. Raises what `refuse` makes where there is no such folder, and where
    the file is missing or broken."""
    if not os.path.isdir(folder):
        raise refuse("there is no such folder", REMEDY)
    content = _content(folder, CONFIG, _MOST_CONFIG, refuse)
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refuse(f"{CONFIG} is no JSON: {error}", REMEDY) from error
    if not isinstance(config, dict):
        raise refuse(f"{CONFIG} holds {shown(config)}, not an object", REMEDY)
    return config, content


def weights_path(folder: str, refuse: Refuse) -> str:
    """Of adapter_model.safetensors. Raises what `refuse` makes where it is not there."""
    path = os.path.join(folder, WEIGHTS)
    if not os.path.isfile(path):
        found = f"it has no {WEIGHTS}"
        if os.path.isfile(os.path.join(folder, PICKLED)):
            found += f"; {PICKLED} is pickled, and reading it would run whatever code is in it"
        raise refuse(found, "save it with safe_serialization=True, the default of PEFT")
    return path


def read_weights(folder: str, refuse: Refuse) -> bytes:
    """adapter_model.safetensors, for adapters of one small tensor: not more than a gibibyte of it. Raises what `refuse`
    makes where it is not there, or cannot be read."""
    weights_path(folder, refuse)
    return _content(folder, WEIGHTS, _MOST_WEIGHTS, refuse)


def _content(folder: str, name: str, most: int, refuse: Refuse) -> bytes:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return file.read(most)
    except OSError as error:
        raise refuse(f"{name}: {error.strerror or error}", REMEDY) from error
