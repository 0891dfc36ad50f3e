"""The cards of Granite 3, and of its mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import integer
from engine_kit.routing import RouteForm
from engine_models.decoder_card import DecoderCard
from engine_models.experts_card import ExpertsCard


class Granite(DecoderCard):
    """GraniteForCausalLM (2024): Llama's form with multipliers."""

    body = "engine_models.granite:GraniteModel"


class GraniteMoe(ExpertsCard):
    """GraniteMoeForCausalLM (2024): the same with routed experts."""

    body = "engine_models.granite:GraniteMoeModel"
    count = ("num_local_experts",)
    inner = "intermediate_size"
    defaults: ClassVar[Mapping[str, Any]] = {"num_local_experts": 8, "num_experts_per_tok": 2}

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """A softmax over the chosen experts alone."""
        return RouteForm(integer(config, "num_experts_per_tok"), renormalise=True)
