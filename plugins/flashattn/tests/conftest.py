"""Kernels are tried in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

sys.path.insert(0, str(Path(__file__).parent))
