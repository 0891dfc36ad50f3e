"""The levels of processor features, lowest first, as options name them (native/kernels.cpp, CMakeLists.txt)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Level = Literal["auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]


class LevelOptions(BaseModel):
    """Options of a driver whose kernels are compiled for several levels.

    Attributes:
        level: the processor features to compute with; "auto" takes the highest that there is. One that the processor
            does not have stops the start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Level = "auto"
