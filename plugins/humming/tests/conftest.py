"""Kernels are tried in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from engine_sdk.interpreted import *  # noqa: F403

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(Path(__file__).parent),
    str(_ROOT / "quantization" / "tests"),
    str(_ROOT / "reference" / "tests" / "parity"),
]
import_kernels("engine_cuda.ops_triton", "engine_humming", "engine_quantization")  # noqa: F405
