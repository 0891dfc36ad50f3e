"""Rotary parameters that differ by the type of layer, as transformers 5 and 4 write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_kit.model_config import rope_parameters


def rope_of(config: Mapping[str, Any], kind: str, theta: float, old_key: str = "rope_theta") -> dict[str, Any]:
    """The config with the rotary parameters of one type of layers alone.

    transformers 5 has them under the types' names. In files of version 4, `rope_scaling` is that of layers that see
    everything; those with a window have the plain form.

    Args:
        kind: "full_attention" or "sliding_attention".
        theta: where config.json is silent.
        old_key: of theta in files of version 4.
    """
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and any(isinstance(value, Mapping) for value in parameters.values()):
        own = dict(parameters.get(kind) or {})
    elif kind == "full_attention":
        own = rope_parameters(config)
    else:
        own = {"rope_theta": config.get(old_key)}
    if own.get("rope_theta") is None:
        own["rope_theta"] = theta
    return {key: value for key, value in config.items() if key != "rope_scaling"} | {"rope_parameters": own}
