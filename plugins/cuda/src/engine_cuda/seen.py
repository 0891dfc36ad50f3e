"""What was seen of the drivers on a GPU: their remarks say it."""

from __future__ import annotations

RAN = (
    "an earlier form's suite ran on an H200: docs/benchmarks/gpu.md says what passed; its speed was not measured at "
    "rest yet"
)
COMPILED = "tried in Triton's interpreter and compiled for sm_80, sm_90 and gfx942, not yet run on a GPU"
