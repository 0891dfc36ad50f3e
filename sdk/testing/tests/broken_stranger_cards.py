"""Cards of strangers' models that take what their bodies do not compute. Light, as cards are."""

from __future__ import annotations

from typing import Any

import msgspec
from engine_gpt2.card import GPT2Card
from engine_mixtral.card import MixtralCard

from engine.interfaces.model import ModelNeed
from engine.types.model import ModelDescription


class TakesAnyActivation(GPT2Card):
    """GPT-2 of any activation function is taken, and gelu_new computed"""

    body = "broken_strangers:ReadsNoActivation"

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        config = {**need.config, "activation_function": "gelu_new"}
        return super().unsupported(ModelNeed(architecture=need.architecture, config=config))


class SeesNoWindow(MixtralCard):
    """a sliding window in the config is passed over"""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        found = super().describe({**config, "sliding_window": None})
        return msgspec.structs.replace(found, config=dict(config))


class SaysItIsCaptured(MixtralCard):
    """the card does not say that its experts, in plain torch, cannot be captured"""

    captured_by = None


GPT2_CARDS = [TakesAnyActivation]
MIXTRAL_CARDS = [SeesNoWindow, SaysItIsCaptured]
