"""The card of quantization driver `deepgemm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from engine.interfaces.platform import STREAM
from engine.interfaces.quantization import QuantizationNeed, Rounding
from engine_deepgemm.installed import CUDA, DISTRIBUTION, READ, facts
from engine_kit.libraries import why_not_installed
from engine_quantization.cards import Stored
from engine_quantization.methods import CompressedTensors, Fp8, Method, method_of

BLOCK = 128
LEAST_CAPABILITY = (9, 0)
MAJORS = (9, 10)
"""Hopper, and Blackwell's large GPUs."""
STEP = 16 / 448
"""Half the distance of the largest two numbers of e4m3, as a share of its largest."""


class DeepGemmOptions(BaseModel):
    """Options of `deepgemm`.

    Attributes:
        warm_up: multiply by each new form of dense layer with 1, 2, 4 ... rows while weights are loaded, so that few
            requests wait for the library's compiler: between these it may choose a kernel of its own. What it compiled
            stays on disk for later starts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    warm_up: bool = True


class DeepGemm(Stored):
    """8-bit floats with a scale for 128 x 128 weights, as DeepSeek stores them, by DeepGEMM's kernels; rows are rounded
    with a scale for each 128 inputs. Not run on a GPU yet."""

    priority = 30  # before `humming` (20) and `stored-triton` (10), where it is installed: README, "Priority"
    captured_by = STREAM
    experts_captured_by = STREAM
    Options = DeepGemmOptions
    body = "engine_deepgemm.body:DeepGemmBody"

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        return stored.get("quant_method") in ("fp8", "compressed-tensors")

    @classmethod
    def rounding(cls, kind: str, options: Any) -> Rounding:
        """Weights are exact. Rows are rounded in groups; a scale that is a power of two is up to twice as large."""
        return Rounding(0.0, 0, (2 if facts().blackwell else 1) * STEP + 2.0**-20, BLOCK)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        found = super().unsupported(need)
        if not found and need.stored is not None and cls.claims(need.stored):
            found += _form_reasons(need.stored, method_of(need.stored))
        if need.dtype != "bfloat16":
            found.append(f"the library gives bfloat16, not {need.dtype}")
        return [*found, *_machine_reasons(need.device)]

    @classmethod
    def remarks(cls, need: QuantizationNeed) -> list[str]:
        return [
            f"it computes with {DISTRIBUTION} {facts().version}, whose kernels {facts().compiler} compiles",
            "it was tested against a double of the library alone, and never run on a GPU",
        ]


def _form_reasons(stored: Mapping[str, Any], method: Method) -> list[str]:
    blocks: list[object] = []
    if isinstance(method, Fp8):
        blocks = [method.weight_block_size]
    elif isinstance(method, CompressedTensors):
        weights = [group.weights for group in method.config_groups.values() if group.weights is not None]
        blocks = [one.block_structure if (one.type, one.how) == ("float", "block") else None for one in weights]
    other = [block for block in blocks if block != [BLOCK, BLOCK]]
    if other:
        form = (
            f"blocks of {' x '.join(map(str, other[0]))}" if isinstance(other[0], list) else "other groups than blocks"
        )
        return [f"the library multiplies 8-bit floats with a scale for {BLOCK} x {BLOCK} alone; weights are in {form}"]
    if facts().blackwell and stored.get("scale_fmt") != "ue8m0":
        return ["on this GPU the library takes scales that are powers of two; quantization_config does not say that "
                f"they are (scale_fmt is {stored.get('scale_fmt')!r}, not 'ue8m0')"]  # fmt: skip
    return []


def _machine_reasons(device: str) -> list[str]:
    from engine_cuda.interpreter import wrong_device
    from engine_cuda.nvidia import wrong_gpu

    found = [*wrong_device(device), *wrong_gpu(device, LEAST_CAPABILITY)]
    there = facts()
    on_gpu = device.partition(":")[0] == "cuda" and not found
    if on_gpu and there.capability is not None and there.capability[0] not in MAJORS:
        found.append(f"it is for compute capability 9.0 and 10.x, the GPU has {'.'.join(map(str, there.capability))}")
    found += why_not_installed(DISTRIBUTION, there.version, READ)
    if not there.version:
        return found
    if on_gpu and (there.cuda is None or there.cuda[0] != CUDA):
        built = "without CUDA" if there.cuda is None else f"for CUDA {there.cuda[0]}.{there.cuda[1]}"
        found.append(f"{DISTRIBUTION} is linked with CUDA {CUDA}, and this torch is built {built}")
    if on_gpu and not there.compiler:
        found.append("nvcc (12.9 or later), which compiles its kernels, is neither in CUDA_HOME nor on the path")
    return found
