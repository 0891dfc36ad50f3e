"""The body of the reference operations: one object with the families of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_reference.ops_torch.elementwise import Elementwise
from engine_reference.ops_torch.inputs import Inputs
from engine_reference.ops_torch.linear import Linear
from engine_reference.ops_torch.logits import Logits
from engine_reference.ops_torch.norm_rope import NormRope
from engine_reference.ops_torch.reject import Reject
from engine_reference.ops_torch.sample import Sample

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class TorchOpsBody(Elementwise, NormRope, Linear, Inputs, Logits, Sample, Reject):
    """All operations of `engine.interfaces.ops.OPERATIONS`, without state, on whatever device its inputs lie."""

    def __init__(self, context: WorkerContext) -> None:
        del context
