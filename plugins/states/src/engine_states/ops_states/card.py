"""The card of the operations of layers that keep states."""

from __future__ import annotations

from engine.interfaces.ops import OpsCard, OpsNeed

DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})
OPERATIONS = frozenset({"causal_conv", "selective_scan", "ssd", "gated_delta", "gated_norm", "gate_by", "join"})
"""What a model with such layers names in its card, beside `engine.interfaces.ops.MODEL_OPERATIONS`."""


class StateOps(OpsCard):
    """Convolutions and scans over the tokens of rows, on plain torch."""

    priority = 0
    framework = "torch"
    operations = OPERATIONS
    defines = OPERATIONS
    batch_invariant = False
    body = "engine_states.ops_states.body:StateOpsBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        reasons = []
        if need.operation not in cls.operations:
            reasons.append(f"operation '{need.operation}' is not one of its own")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(sorted(DTYPES))}")
        return reasons
