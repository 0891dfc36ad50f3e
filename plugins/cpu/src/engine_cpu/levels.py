"""The levels of processor features, lowest first, as options name them (native/kernels.cpp, CMakeLists.txt)."""

from __future__ import annotations

from typing import Literal

Level = Literal["auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]
