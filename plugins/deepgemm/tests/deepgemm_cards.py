"""The card of driver `deepgemm` over the double of its library, which serves the processor."""

from __future__ import annotations

from engine.interfaces.quantization import QuantizationNeed
from engine_deepgemm.card import DeepGemm, _form_reasons
from engine_quantization.cards import Stored
from engine_quantization.methods import method_of


class DoubleDeepGemm(DeepGemm):
    """All that the card says, but for the machine."""

    body = "deepgemm_body:DoubleBody"

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        found = Stored.unsupported.__func__(cls, need)
        if not found and need.stored is not None and cls.claims(need.stored):
            found += _form_reasons(need.stored, method_of(need.stored))
        return found if need.dtype == "bfloat16" else [*found, "bfloat16"]
