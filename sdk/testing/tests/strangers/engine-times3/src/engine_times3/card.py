"""The card of driver `times3`. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.interfaces.quantization import KINDS, QuantizationCard


class Times3Card(QuantizationCard):
    """Weights that are stored as int8, a third of what they stand for, but for those of the layers in `ignore`."""

    framework = "torch"
    kinds = frozenset(KINDS)
    rounds = False
    body = "engine_times3.body:Times3"

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        return stored.get("quant_method") == "times3"

    @classmethod
    def covers(cls, stored: Mapping[str, Any], layer: str, kind: str) -> bool:
        return layer not in stored.get("ignore", ())
