"""FlashAttention 4 itself takes what is handed to it, and compiles it for an H100: without a GPU, where it is installed
beside a torch that knows CUDA."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_flashattn import installed

HOPPER = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
"""FlashAttention's own variables, and the compiler's."""


@pytest.mark.slow
@pytest.mark.skipif("fa4" not in installed.facts().versions, reason="FlashAttention 4 is not installed")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_it_compiles_our_calls_for_an_h100() -> None:
    import torch

    if torch.version.cuda is None:
        pytest.skip("this torch is not built for CUDA")
    program = Path(__file__).parent / "fa4_compiled.py"
    environment = {**os.environ, **HOPPER, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert len(ran.stdout.splitlines()) == 13
