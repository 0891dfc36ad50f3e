"""Kernels are tried in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from engine_sdk.interpreted import *  # noqa: F403

_ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(Path(__file__).parent))  # for `compiled`
sys.path += [str(_ROOT / "core/tests/runner"), str(_ROOT / "plugins/reference/tests/attention")]  # for `harness`
DRIVERS = (
    "attention_block_sparse",
    "attention_mla",
    "attention_triton",
    "communicator_custom_allreduce",
    "ops_triton",
    "ops_triton_gemv",
    "platform_cuda",
    "quantization_fp8",
)
import_kernels(*(f"engine_cuda.{driver}" for driver in DRIVERS))  # noqa: F405
