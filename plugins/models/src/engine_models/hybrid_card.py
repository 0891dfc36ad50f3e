"""What the cards of hybrids have in common: decoders of which some layers attend, and some keep states. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.interfaces.ops import MODEL_OPERATIONS
from engine.types.model import ModelDescription
from engine_kit.model_config import bad_key, flag, integer, number
from engine_models.decoder_card import DecoderCard
from engine_models.mamba_card import bounds
from engine_states.forms import Mamba1Form, Mamba2Form
from engine_states.ops_states.card import OPERATIONS


class HybridCard(DecoderCard):
    """Base of their cards. A layer may have a mixer, attention, both or neither."""

    operations = frozenset(MODEL_OPERATIONS) | OPERATIONS

    @classmethod
    def mixer(cls, config: Mapping[str, Any]) -> Mamba1Form | Mamba2Form:
        """Of every mixer. `config` is filled. Raises CheckpointError where a key is missing or makes no sense."""
        raise NotImplementedError

    @classmethod
    def mixes(cls, config: Mapping[str, Any]) -> list[bool]:
        """Which layers have a mixer. Raises as `mixer`."""
        return [True] * integer(config, "num_hidden_layers")

    @classmethod
    def attends(cls, config: Mapping[str, Any]) -> list[bool]:
        """Which layers have attention; those that have no mixer, unless the architecture says otherwise."""
        return [not mixes for mixes in cls.mixes(config)]

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """As `DecoderCard.describe`, with states where layers have a mixer."""
        model, config = super().describe(config), cls.filled(config)
        mixer, specs = cls.mixer(config), []
        layers = zip(cls.mixes(config), cls.attends(config), model.kv_specs, strict=True)
        for index, (mixes, attends, spec) in enumerate(layers):
            specs += [mixer.spec("wide", layer=index)] if mixes else []
            specs += [msgspec.structs.replace(spec, layer=index)] if attends else []
        return msgspec.structs.replace(model, kv_specs=tuple(specs))

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        reasons = super()._unsupported_parts(config, tp)
        return reasons or (cls.mixer(config).unsupported_ranks(tp) if any(cls.mixes(config)) else [])


def mamba2_form(config: Mapping[str, Any], inner: int, bias: str = "mamba_proj_bias") -> Mamba2Form:
    """A mixer of so many channels, by keys that begin with "mamba_". bias: the key of the projections' biases.

    Raises CheckpointError where a key makes no sense.
    """
    heads, groups = integer(config, "mamba_n_heads", 128), integer(config, "mamba_n_groups", 1)
    auto = config.get("mamba_d_head") in (None, "auto")
    size = inner // heads if auto else integer(config, "mamba_d_head")
    if heads * size != inner:
        found = f"{heads} heads of mamba_d_head = {size} are not the {inner} channels"
        raise bad_key(config, "mamba_n_heads", found)
    if heads % groups:
        raise bad_key(config, "mamba_n_groups", f"{heads} heads do not stand in {groups} groups of one size")
    return Mamba2Form(
        hidden_size=integer(config, "hidden_size"),
        heads=heads,
        head_size=size,
        groups=groups,
        state=integer(config, "mamba_d_state", 256),
        kernel=integer(config, "mamba_d_conv", 4, low=2),
        eps=number(config, "rms_norm_eps", 1e-5),
        dt_limit=bounds(config, "time_step_limit"),
        bias=flag(config, bias, False),
        conv_bias=flag(config, "mamba_conv_bias", True),
    )


def factors(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """So many numbers above 0; all 1 where the key is missing or null. Raises CheckpointError."""
    given = config.get(key)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, (list, tuple)) or len(given) != count:
        raise bad_key(config, key, f"{given!r} are not {count} numbers")
    return tuple(number({**config, key: one}, key) for one in given)
