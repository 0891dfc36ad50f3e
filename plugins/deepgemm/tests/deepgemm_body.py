"""The body of driver `deepgemm` over the double of its library."""

from __future__ import annotations

import sys
from typing import Any

import deep_gemm_double

from engine_deepgemm.body import DeepGemmBody


class DoubleBody(DeepGemmBody):
    """The driver's own, but for where the library comes from."""

    def __init__(self, context: Any) -> None:
        before = sys.modules.get("deep_gemm")
        sys.modules["deep_gemm"] = deep_gemm_double
        try:
            super().__init__(context)
            self._warm_up = False  # nothing is compiled here
        finally:
            if before is None:
                del sys.modules["deep_gemm"]
            else:
                sys.modules["deep_gemm"] = before
