"""The card of the reference operations."""

from __future__ import annotations

from engine.interfaces.ops import OPERATIONS, OpsCard, OpsNeed

DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})
VARYING = frozenset({"pack_linear", "linear", "linear_heads", "gelu_mul", "gelu"})
"""Operations for which torch takes other instructions for other numbers of rows: a row's bits depend on them."""


class TorchOps(OpsCard):
    """Every operation, on plain torch: the meaning that faster drivers are compared with."""

    priority = 0
    framework = "torch"
    operations = frozenset(OPERATIONS)
    batch_invariant = True
    body = "engine_reference.ops_torch.ops:TorchOpsBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        reasons = []
        if need.operation not in cls.operations:
            reasons.append(f"operation '{need.operation}' is not one of its own")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(sorted(DTYPES))}")
        if need.batch_invariant and need.operation in VARYING:
            reasons.append("torch takes other instructions for other numbers of rows: a row's bits depend on them")
        return reasons
