"""Faulty cards of quantization drivers: light, as cards are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_times3.card import Times3Card

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


class ClaimsEverything(Times3Card):
    """whatever form a config names is claimed"""

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        return True


class ClaimsNothing(Times3Card):
    """its own form is not claimed"""

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        return False


class CoversEverything(Times3Card):
    """what the config leaves plain is read in the form"""

    @classmethod
    def covers(cls, stored: Mapping[str, Any], layer: str, kind: str) -> bool:
        return True


class CoversNothing(Times3Card):
    """every layer is taken for a plain one"""

    @classmethod
    def covers(cls, stored: Mapping[str, Any], layer: str, kind: str) -> bool:
        return False


class PlainRoundingCard(AbsmaxQuantization):
    """Weights and rows of 8 bits, which norms and activations round as they make them."""

    body = "plain_rounding:PlainRounding"

    @classmethod
    def rounding(cls, kind: str, options: AbsmaxOptions) -> Rounding:
        return super().rounding(kind, options)._replace(row=0.5 / 127 + 2.0**-20)
