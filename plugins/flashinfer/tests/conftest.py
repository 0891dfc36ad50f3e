"""Kernels are tried in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from engine_sdk.interpreted import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parent))
