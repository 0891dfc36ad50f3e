"""Rotary positions as config.json describes them, in one form. Torch-free; `rotary` makes the tables.

transformers 4 writes `rope_theta` beside `rope_scaling: {"type" or "rope_type": ...}`; transformers 5 puts all of it
into `rope_parameters`. Where both stand, `rope_scaling` wins, as in transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.types.errors import CheckpointError, UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""The kinds of scaling that `engine.modeling.rotary` computes."""

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions of one model.

    Args:
        rope_type: one of `ROPE_TYPES`.
        theta: the base of the wavelengths.
        rotary_dim: how many of a head's first elements are rotated; even.
        max_position: `max_position_embeddings`.
        original_max_position: positions before scaling (yarn, llama3); equals `max_position` where not given.
        factor: by how much the context is stretched; 1.0 for "default".
        attention_factor: cosines and sines are multiplied by it; None: computed from the factor (yarn only).
        mscale, mscale_all_dim: yarn's other way to state the attention factor.
        beta_fast, beta_slow: yarn's ramp, in rotations over the original length.
        truncate: yarn's ramp starts and ends at whole dimensions.
        low_freq_factor, high_freq_factor: llama3's ramp.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position: int
    original_max_position: int
    factor: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The raw parameters in transformers 5's form: `rope_type`, `rope_theta` and what the type needs.

    Raises CheckpointError where they are not an object.
    """
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(raw, Mapping):
        raise CheckpointError("read the rotary parameters of config.json", f"they are {raw!r:.80}, not an object")
    parameters = dict(raw)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is None and config.get(key) is not None:
            parameters[key] = config[key]
    return parameters


def unsupported_rope(config: Mapping[str, Any]) -> list[str]:
    """Why the rotary parameters cannot be served: for a card's `unsupported`. Empty where they can."""
    parameters = rope_parameters(config)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return ["rope_parameters differ by layer type, this model has one set for all layers"]
    if parameters["rope_type"] not in ROPE_TYPES:
        return [f"rope_type {parameters['rope_type']!r} is none of {', '.join(ROPE_TYPES)}"]
    if "mrope_section" in parameters:
        return ["rope_parameters.mrope_section asks for several positions a token, this model has one"]
    return []


def read_rope(config: Mapping[str, Any], head_size: int) -> RopeConfig:
    """Read and check the rotary parameters.

    Raises:
        UnsupportedModelError: the kind of scaling is unknown.
        CheckpointError: a parameter is missing or makes no sense.
    """
    reasons = unsupported_rope(config)
    if reasons:
        raise UnsupportedModelError("rotary positions as config.json describes them", "; ".join(reasons))
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]

    def value(key: str, default: float | None = None, source: Mapping[str, Any] = parameters) -> float:
        found = source.get(key)
        if found is None:
            found = default
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < float("inf"):
            problem = "it is missing" if found is None else f"it is {found!r}, not a positive number"
            raise CheckpointError(
                f"read {key!r} for rope_type {kind!r}", problem, "correct the rotary parameters in config.json"
            )
        return found

    def optional(key: str) -> float | None:
        return None if parameters.get(key) is None else value(key)

    positions = value("max_position_embeddings", None, config)
    if positions != int(positions):
        found = f"it is {positions!r}, not a whole number"
        raise CheckpointError("read 'max_position_embeddings' of config.json", found, "correct config.json")
    max_position = int(positions)
    rotary_dim = int(head_size * value("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        raise CheckpointError(
            "read the rotary parameters of config.json",
            f"{rotary_dim} of {head_size} elements of a head would be rotated",
            "the number must be even, positive, and at most the head's size",
        )
    common: dict[str, Any] = {
        "rope_type": kind,
        "theta": value("rope_theta", DEFAULT_THETA),
        "rotary_dim": rotary_dim,
        "max_position": max_position,
        "original_max_position": max_position,
    }
    if kind == "default":
        return RopeConfig(**common)
    if kind in ("linear", "dynamic"):
        return RopeConfig(**common, factor=value("factor"))
    # As in transformers: a number beside the rotary parameters goes before the one in them (Phi3's form).
    own = parameters.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = config.get("original_max_position_embeddings", own)
    common["original_max_position"] = int(value("original_max_position_embeddings", max_position))
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if low >= high:
            raise CheckpointError(
                "read the rotary parameters of config.json",
                f"low_freq_factor = {low} is not below high_freq_factor = {high}",
            )
        return RopeConfig(**common, factor=value("factor"), low_freq_factor=low, high_freq_factor=high)
    return RopeConfig(
        **common,
        factor=value("factor", max_position / common["original_max_position"]),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        # transformers takes 0 for "not given" here, hence `or`.
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=bool(parameters.get("truncate", True)),
    )


def scaled_length(rope: RopeConfig) -> int:
    """The positions that a model serves, scaling counted in.

    "linear" stretches `max_position_embeddings` by the factor and "yarn" the original length (which some configs have
    already done); "llama3" configs state the stretched length; "dynamic" is served up to the original length only.
    As vLLM derives it.
    """
    if rope.rope_type == "linear":
        return int(rope.max_position * rope.factor)
    if rope.rope_type == "yarn":
        return max(rope.max_position, int(rope.original_max_position * rope.factor))
    return rope.max_position
