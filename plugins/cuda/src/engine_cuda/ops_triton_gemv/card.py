"""The card of the linear layer for few rows."""

from __future__ import annotations

from importlib.util import find_spec

from engine.interfaces.ops import OpsCard, OpsNeed
from engine_cuda.interpreter import wrong_device
from engine_cuda.seen import COMPILED

DTYPES = ("bfloat16", "float16", "float32")


class TritonGemv(OpsCard):
    """The linear layer by a kernel of its own where there are few rows, by torch's product where there are more.

    `auto` never takes it: which is faster was not measured yet. `--ops triton_gemv` asks for it, and leaves the other
    operations as they are.
    """

    priority = -1  # after torch's, which has every operation
    framework = "torch"
    operations = frozenset({"pack_linear", "linear"})
    body = "engine_cuda.ops_triton_gemv.body:TritonGemvBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        reasons = wrong_device(need.device)
        if not reasons and find_spec("triton") is None:
            reasons.append("Triton is not installed (pip install triton)")
        if need.operation not in cls.operations:
            reasons.append(f"operation '{need.operation}' is not one of its own")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        return reasons

    @classmethod
    def remarks(cls, need: OpsNeed) -> list[str]:
        return [COMPILED]
