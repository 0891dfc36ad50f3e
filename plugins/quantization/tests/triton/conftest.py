"""Kernels are tried in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from engine_sdk.interpreted import *  # noqa: F403

_ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(Path(__file__).parents[1]), str(_ROOT / "cuda" / "tests")]  # for `written` and `compiled`
import_kernels("engine_cuda.quantization_fp8", "engine_quantization")  # noqa: F405
