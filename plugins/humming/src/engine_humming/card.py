"""The card of quantization driver `humming`."""

from __future__ import annotations

from typing import Any

from engine.interfaces.platform import STREAM
from engine.interfaces.quantization import QuantizationNeed, Rounding
from engine_humming.installed import DISTRIBUTION, READ, facts
from engine_kit.libraries import install_line, why_not_installed
from engine_quantization.cards import Stored
from engine_quantization.methods import Bitsandbytes, Form, Mxfp4, method_of

DTYPES = {"bfloat16": (8, 0), "float16": (7, 5)}
"""Of activations, and the least compute capability that multiplies them."""
LEAST_GROUP = 16
LAYERS = {
    "linear": "model.layers.0.mlp.up_proj",
    "head": "lm_head",
    "expert": "model.layers.0.mlp.experts.0.up_proj",
}
"""A name of each kind: how a layer is stored a method says by its name."""
NEAR = 2.0**-8
"""How far a weight moves, of its size: scales take the dtype of activations."""


class Humming(Stored):
    """AWQ, GPTQ, compressed-tensors, FP8, MXFP4 and int8 weights multiplied as they are stored by 16-bit rows, by
    Humming's kernels. Not run on a GPU yet."""

    priority = 20  # before `stored-triton` (10), behind `deepgemm` (30): README, "Priority"
    captured_by = STREAM
    experts_captured_by = STREAM
    Options = None
    body = "engine_humming.body:HummingBody"

    @classmethod
    def rounding(cls, kind: str, options: Any) -> Rounding:
        """Rows stay as they are."""
        return Rounding(NEAR)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        found = super().unsupported(need)
        if not found and need.stored is not None and cls.claims(need.stored):
            method = method_of(need.stored)
            if isinstance(method, Bitsandbytes) and method.load_in_4bit:
                found.append("the library has no product for codes that stand for numbers of a table (nf4, fp4)")
            if isinstance(method, Mxfp4) and need.dtype == "float16":
                found.append("float16 does not hold the range of MXFP4's scales; it takes bfloat16")
            found += _form_reasons(method.form(LAYERS[need.kind], need.kind), need.kind)
        if need.dtype not in DTYPES:
            found.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        return [*found, *_machine_reasons(need.device, DTYPES.get(need.dtype, (0, 0)))]

    @classmethod
    def remarks(cls, need: QuantizationNeed) -> list[str]:
        return [
            f"it computes with {DISTRIBUTION} {facts().version}, which compiles its kernels by {facts().compiler}",
            "it was tested against a double of the library alone, and never run on a GPU",
        ]


def _form_reasons(form: Form | None, kind: str) -> list[str]:
    """Of most layers of the kind; what the library does not take of single ones shows while they are loaded."""
    found = []
    if form is not None and form.group and not takes_groups(form.group):
        found.append(f"{form.group} inputs share a scale, which is no power of two from {LEAST_GROUP} on")
    if form is not None and form.ordered and kind == "expert":
        found.append("experts' groups of inputs follow one another in an order of their own (g_idx)")
    return found


def takes_groups(size: int) -> bool:
    """Whether the library has a product for so many inputs that share a scale."""
    return size >= LEAST_GROUP and not size & size - 1


def _machine_reasons(device: str, capability: tuple[int, int]) -> list[str]:
    from engine_cuda.interpreter import wrong_device
    from engine_cuda.nvidia import wrong_gpu

    found = [*wrong_device(device), *wrong_gpu(device, capability)]
    there = facts()
    on_gpu = device.partition(":")[0] == "cuda" and not found
    found += why_not_installed(DISTRIBUTION, there.version, READ, there.extra)
    if not there.version:
        return found
    install = install_line(DISTRIBUTION, READ, there.extra)
    if there.missing:
        found.append(f"{', '.join(there.missing)}, which {DISTRIBUTION} imports, is not there ({install})")
    if on_gpu and not there.compiler:
        found.append(f"neither NVRTC nor nvcc, one of which compiles its kernels, is there ({install})")
    return found
