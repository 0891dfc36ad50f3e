"""The card of quantization driver `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.interfaces.quantization import EMBEDDING, KINDS, QuantizationCard, QuantizationNeed
from engine_kit.ggml_blocks import stored_by_ggml


class GGUFQuantization(QuantizationCard):
    """Weights as ggml's blocks hold them, which are worked out anew for each multiplication: on any device and in any
    dtype, and slow. What faster drivers are compared with."""

    framework = "torch"
    kinds = frozenset({*KINDS, EMBEDDING})
    rounds = False
    body = "engine_gguf.quantization:GGUFQuantizationBody"

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        """Those of a GGUF file."""
        return stored_by_ggml(stored)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        """None."""
        return []
