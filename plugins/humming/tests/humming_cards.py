"""The card of driver `humming` over the double of its library, which serves the processor."""

from __future__ import annotations

from engine.interfaces.quantization import QuantizationNeed
from engine_humming.card import DTYPES, Humming
from engine_quantization.cards import Stored


class DoubleHumming(Humming):
    """All that the card says, but for the machine."""

    body = "humming_body:DoubleBody"

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        found = Stored.unsupported.__func__(cls, need)
        return found if need.dtype in DTYPES else [*found, "16 bits"]
