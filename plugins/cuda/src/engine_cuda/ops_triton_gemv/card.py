"""The card of the linear layer for few rows."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from pydantic import BaseModel, ConfigDict

from engine.interfaces.ops import OpsCard, OpsNeed
from engine_cuda.interpreter import wrong_device
from engine_cuda.seen import COMPILED

DTYPES = ("bfloat16", "float16", "float32")


class TritonGemvOptions(BaseModel):
    """Options of `triton_gemv`.

    Attributes:
        choose: "rows" takes the kernel for up to 4 rows and torch's product for more; "time" times, when the engine
            starts, each product of the steps that are captured by cuBLAS, cuBLASLt and the kernel, and takes the
            fastest for each matrix and number of rows (the log says which, and by how much), but for layers that the
            kernel computes with what lies around their products. Starts that find others differ in the last bits of
            their results: not where ranks compute the same.
        cache: the file in which that is kept for the next start on such a GPU; "": nowhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    choose: Literal["rows", "time"] = "rows"
    cache: str = "~/.cache/engine-cuda/products.json"


class TritonGemv(OpsCard):
    """The linear layer by a kernel of its own where there are few rows, by torch's product where there are more.

    `auto` never takes it: which is faster was not measured yet. `--ops triton_gemv` asks for it, and leaves the other
    operations as they are.
    """

    priority = -1  # after torch's, which has every operation
    framework = "torch"
    Options = TritonGemvOptions
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
