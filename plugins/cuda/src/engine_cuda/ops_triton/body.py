"""The body of the operations in Triton: one object with the families of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_cuda.dependents import depends
from engine_cuda.ops_triton.activations import Activations
from engine_cuda.ops_triton.adapters import Adapters
from engine_cuda.ops_triton.experts import Experts
from engine_cuda.ops_triton.inputs import Inputs
from engine_cuda.ops_triton.logits import Logits
from engine_cuda.ops_triton.logprobs import Logprobs
from engine_cuda.ops_triton.norms import Norms
from engine_cuda.ops_triton.rotary import RotaryPositions
from engine_cuda.ops_triton.routing import Routing
from engine_cuda.ops_triton.rows import Rows
from engine_cuda.ops_triton.sampling import Sampling
from engine_cuda.ops_triton.states import Scans

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class TritonOpsBody(
    Rows, Activations, Norms, RotaryPositions, Inputs, Scans, Routing, Experts, Adapters, Logits, Sampling, Logprobs
):
    """See `engine.interfaces.ops.Ops`. Without state; nothing waits for the device, and what is launched and allocated
    depends on shapes alone, so that all of it can be captured."""

    def __init__(self, context: WorkerContext | None) -> None:
        self.dependent = depends(context)
        self.device = None if context is None else context.device
