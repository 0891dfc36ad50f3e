"""Faulty cards of quantization drivers: light, as cards are."""

from __future__ import annotations

from typing import Any

from engine.interfaces.quantization import QuantizationNeed, Rounding
from engine_reference.quantization_absmax.card import AbsmaxOptions, AbsmaxQuantization


class Overstates(AbsmaxQuantization):
    """the card says that weights are four times as exact as they are"""

    @classmethod
    def rounding(cls, kind: str, options: AbsmaxOptions) -> Rounding:
        found = super().rounding(kind, options)
        return found._replace(weight=found.weight / 4)


class SaysNothing(AbsmaxQuantization):
    """the card does not say how exact it is"""

    @classmethod
    def rounding(cls, kind: str, options: AbsmaxOptions) -> Any:
        return None


class ServesEverything(AbsmaxQuantization):
    """the card claims to serve whatever it is asked for"""

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        return []
