"""A toy operation, which a driver defines, and which nobody else knows: for tests of what models may call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.interfaces.ops import OpsCard, OpsNeed

if TYPE_CHECKING:
    import torch

OPERATION = "toy_reverse"


class ToyOps(OpsCard):
    """The toy operation alone."""

    framework = "torch"
    operations = defines = frozenset({OPERATION})
    batch_invariant = True
    body = f"{__name__}:ToyOpsBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        """Whatever the dtype."""
        return [] if need.operation in cls.operations else [f"it computes no {need.operation}"]


class ToyOpsBody:
    """See `engine.interfaces.ops.Ops`."""

    def __init__(self, context: object) -> None: ...

    def toy_reverse(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, V] -> the same with its last dimension reversed."""
        return x.flip(-1)
