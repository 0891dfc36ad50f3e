"""The card of the operations of LoRA adapters."""

from __future__ import annotations

from engine.interfaces.adapter import OPERATIONS
from engine.interfaces.ops import OpsCard, OpsNeed

DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})


class LoRAOps(OpsCard):
    """One adapter after the other, on plain torch."""

    priority = 0
    framework = "torch"
    operations = frozenset(OPERATIONS)
    defines = frozenset(OPERATIONS)
    captured_by = frozenset()
    body = "engine_lora.ops_lora.body:LoRAOpsBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        reasons = []
        if need.operation not in cls.operations:
            reasons.append(f"operation '{need.operation}' is not one of its own")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(sorted(DTYPES))}")
        return reasons
