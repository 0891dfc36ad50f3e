"""The card of quantization driver `gguf_cpu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.interfaces.quantization import EMBEDDING, KINDS, Rounding
from engine_cpu.levels import LevelOptions
from engine_cpu.quantization_card import ROW, NativeQuantization
from engine_kit.ggml_blocks import stored_by_ggml


class GGUFQuantization(NativeQuantization):
    """Weights in the blocks of a GGUF file, in as many bits as there; rows rounded to 8 bits by scales of 16 or 32
    inputs."""

    priority = 10
    kinds = frozenset({*KINDS, EMBEDDING})
    Options = LevelOptions
    rounds = False
    body = "engine_cpu.quantization_gguf.body:GGUFBody"

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        """Those of a GGUF file."""
        return stored_by_ggml(stored)

    @classmethod
    def rounding(cls, kind: str, options: LevelOptions) -> Rounding:
        """Of rows: in groups of 32 inputs, or of 16, which are a part of such."""
        return Rounding(0.0, 0, ROW, 32)
