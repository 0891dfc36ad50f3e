"""The card of the reference operations."""

from __future__ import annotations

from engine.interfaces.ops import OPERATIONS, OpsCard, OpsNeed

DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})


class TorchOps(OpsCard):
    """Every operation, on plain torch: the meaning that faster drivers are compared with."""

    priority = 0
    framework = "torch"
    operations = frozenset(OPERATIONS)
    body = "engine_reference.ops_torch.ops:TorchOpsBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        reasons = []
        if need.operation not in cls.operations:
            reasons.append(f"operation '{need.operation}' is not one of its own")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(sorted(DTYPES))}")
        return reasons
