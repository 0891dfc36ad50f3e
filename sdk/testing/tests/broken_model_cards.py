"""Cards of models: a sound one, and some that are faulty themselves. Light, as cards are."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types.errors import CheckpointError
from engine.types.model import ModelDescription
from engine_reference.models.llama_card import Llama


class Sound(Llama):
    """A Llama. transformers' class of that name is the oracle."""


class ChangesTheConfig(Sound):
    """describe fills the config's gaps in place"""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        config.setdefault("rope_scaling", None)
        return super().describe(config)


class OtherEachTime(Sound):
    """described again, the model is longer"""

    asked = 0

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        cls.asked += 1
        found = super().describe(config)
        return msgspec.structs.replace(found, max_model_len=found.max_model_len + cls.asked)


class OneLayerLess(Sound):
    """a layer too few is described"""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        found = super().describe(config)
        return msgspec.structs.replace(found, num_layers=found.num_layers - 1, kv_specs=found.kv_specs[1:])


class AllHeadsInTheCache(Sound):
    """the cache is described with as many heads as there are of queries"""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        found = super().describe(config)
        specs = tuple(msgspec.structs.replace(spec, num_kv_heads=found.num_q_heads) for spec in found.kv_specs)
        return msgspec.structs.replace(found, kv_specs=specs)


class SmallWindow(Sound):
    """a sliding window is described that the model has not"""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        found = super().describe(config)
        specs = tuple(msgspec.structs.replace(s, kind="sliding", sliding_window=4) for s in found.kv_specs)
        return msgspec.structs.replace(found, kv_specs=specs)


class HoldsNoQuantised(Sound):
    """the card names no kind of layer that is packed, and the body packs them"""

    quantized = frozenset()


class BareErrors(Sound):
    """a size that is missing is an error that does not name it"""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        try:
            return super().describe(config)
        except CheckpointError:
            raise CheckpointError("read config.json", "it is broken") from None


class TakesAnything(Sound):
    """sizes are read as they are, whatever they are"""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        found = super().describe({**config, "vocab_size": 99})
        return msgspec.structs.replace(found, vocab_size=int(float(config.get("vocab_size") or 7)), config=config)


CARDS = [
    ChangesTheConfig, OtherEachTime, OneLayerLess, AllHeadsInTheCache, SmallWindow, HoldsNoQuantised, BareErrors,
    TakesAnything,
]  # fmt: skip
