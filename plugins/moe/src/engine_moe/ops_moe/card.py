"""The card of the operations of mixtures of experts."""

from __future__ import annotations

from engine.interfaces.ops import OpsCard, OpsNeed

DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})
OPERATIONS = frozenset({"router_logits", "route", "pack_experts", "experts", "place_experts", "gated_act", "moe_gate"})
"""What a model with routed experts names in its card, beside `engine.interfaces.ops.MODEL_OPERATIONS`."""
_PRODUCTS = ("router_logits", "experts")


class MoeOps(OpsCard):
    """Routing, and products with experts, one after the other, on plain torch."""

    priority = 0
    framework = "torch"
    operations = OPERATIONS
    defines = OPERATIONS
    captured_by = frozenset()
    batch_invariant = True
    body = "engine_moe.ops_moe.body:MoeOpsBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        reasons = []
        if need.operation not in cls.operations:
            reasons.append(f"operation '{need.operation}' is not one of its own")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(sorted(DTYPES))}")
        if need.batch_invariant and need.operation in _PRODUCTS:
            reasons.append("torch takes other instructions for other numbers of rows: a row's bits depend on them")
        return reasons
