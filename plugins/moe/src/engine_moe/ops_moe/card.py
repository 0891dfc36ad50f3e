"""The card of the operations of mixtures of experts."""

from __future__ import annotations

from typing import NamedTuple

from engine.interfaces.ops import OpsCard, OpsNeed

DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})
OPERATIONS = frozenset({"moe_route", "moe_apply", "moe_gate"})
"""What a model with routed experts names in its card, beside `engine.interfaces.ops.MODEL_OPERATIONS`."""
CLAMPED = "moe_clamped_glu"
"""What one names whose experts have a `ClampedGLU`."""


class RouteForm(NamedTuple):
    """How a layer chooses experts.

    Args:
        top_k: experts of a token.
        sigmoid: scores are sigmoid(logits), each expert for itself; False: softmax over all of them.
        renormalise: the weights of the chosen ones add up to 1 before they are scaled.
        scale: of the weights.
        groups: the experts stand in so many groups of equal size, of which `top_groups` are open to a token: those
            whose best expert, or with `pairs` whose two best together, score highest.
        top_groups, pairs: see `groups`.
        jitter: each expert is the best of those left, one after the other, and its weight that of a softmax over those
            left whose logits are within 2 * jitter of the best, relative to the larger of both (SparseMixer-v2, Liu et
            al. 2024, as Phi-3.5-MoE computes outside of training). Only `top_k` and `biased_logits` count beside it.
            None: not so.
        biased_logits: the router's bias is added to the logits, and so to the weights too; False: it is added to the
            scores by which experts are chosen.
    """

    top_k: int
    sigmoid: bool = False
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    pairs: bool = False
    jitter: float | None = None
    biased_logits: bool = False


class ClampedGLU(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate), of a gate of at most `limit` and an up within it to both sides (gpt-oss,
    2025)."""

    alpha: float
    limit: float


class MoeOps(OpsCard):
    """Routing and the grouping of tokens by expert, on plain torch."""

    priority = 0
    framework = "torch"
    operations = OPERATIONS | {CLAMPED}
    defines = operations
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
        if need.batch_invariant and need.operation == "moe_route":
            reasons.append("torch takes other instructions for other numbers of rows: a row's bits depend on them")
        return reasons
