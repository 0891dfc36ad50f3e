"""The card of Nemotron-4 and Minitron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.interfaces.ops import MODEL_OPERATIONS
from engine_models.decoder_card import DecoderCard


class Nemotron(DecoderCard):
    """NemotronForCausalLM: Nemotron-4 (2024), Minitron."""

    body = "engine_models.nemotron:NemotronModel"
    operations = frozenset((*MODEL_OPERATIONS, "relu"))
    defaults: ClassVar[Mapping[str, Any]] = {"hidden_act": "relu2", "partial_rotary_factor": 0.5, "norm_eps": 1e-5}
    activations: ClassVar[Mapping[str, str]] = {"relu2": "relu2", "relu": "relu"}
    partial = True
