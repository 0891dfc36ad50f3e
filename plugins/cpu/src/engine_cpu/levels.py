"""The levels of processor features, lowest first, as options name them (native/kernels.cpp, native/levels.cmake)."""

from __future__ import annotations

import importlib
from typing import Literal

from pydantic import BaseModel, ConfigDict

from engine_cpu.native import MODULE, why_not_built

Level = Literal["auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_bf16"]

NOT_RUN = {"avx512_amx": "in an emulation", "neon": "in an emulator", "neon_bf16": "in an emulator"}
"""Levels that no processor was at hand for, and where their tests passed instead."""


def not_run() -> list[str]:
    """What to know of the highest level here, which "auto" takes, where that was never run: for a card's `remarks`."""
    level = "" if why_not_built() else importlib.import_module(MODULE).levels()[-1]
    if level not in NOT_RUN:
        return []
    return [f"its level {level} was tested {NOT_RUN[level]} alone, never on a processor that has it"]


class LevelOptions(BaseModel):
    """Options of a driver whose kernels are compiled for several levels.

    Attributes:
        level: the processor features to compute with; "auto" takes the highest that there is. One that the processor
            does not have stops the start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Level = "auto"
