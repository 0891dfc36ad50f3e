"""The card of attention driver `flashinfer`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.attention import AttentionCard, AttentionNeed
from engine_flashinfer.installed import CACHE, TESTED, Facts, facts
from engine_kit.libraries import numbers_of, why_not_installed

DTYPES = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"
HEAD_SIZES = (64, 128, 256)
KINDS = frozenset({"full", "sliding"})
LEAST_CAPABILITY = (8, 0)


class FlashInferOptions(BaseModel):
    """Options of `flashinfer`.

    Attributes:
        workspace_mib: memory of each body for the pieces of rows that are divided over the GPU. FlashInfer stops the
            step where it is too small.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    workspace_mib: int = Field(default=256, ge=16, le=4096)


class FlashInferAttention(AttentionCard):
    """Paged attention by FlashInfer's kernels, planned on the host by bounds and exact on the device."""

    priority = 30  # behind FlashAttention's libraries, before the Triton kernels of engine-cuda: README, "Priority"
    framework = "torch"
    kinds = KINDS
    Options = FlashInferOptions
    body = "engine_flashinfer.body:FlashInferBody"

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        found = _layer_reasons(need)
        if need.device.partition(":")[0] != "cuda":
            return [*found, f"it needs an NVIDIA GPU, not device {need.device}"]
        return [*found, *_machine_reasons(facts())]

    @classmethod
    def remarks(cls, need: AttentionNeed) -> list[str]:
        there = facts()
        return [
            f"it computes with FlashInfer {there.version}, its kernels {there.kernels or 'nowhere'}",
            "it was tested against a double of the library alone, and never run on a GPU",
        ]


def _layer_reasons(need: AttentionNeed) -> list[str]:
    found = []
    if need.kind not in KINDS:
        found.append(f"layers of kind '{need.kind}' are not served, only full and sliding")
    if need.dtype not in DTYPES:
        found.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
    if need.kv_dtype not in (need.dtype, FP8):
        found.append(f"a cache of {need.kv_dtype} under queries of {need.dtype} is not served, only of that or {FP8}")
    if need.head_size not in HEAD_SIZES:
        found.append(f"heads have {', '.join(map(str, HEAD_SIZES))} elements, not {need.head_size}")
    if "kv_index" in need.features:
        found.append("feature 'kv_index' is not served: a row's queries must be its last tokens")
    if "alibi" in need.features:
        found.append("feature 'alibi' is not served: FlashInfer takes slopes of its own making, not the model's")
    unknown = sorted(need.features - {"kv_index", "alibi", "sinks", "lse"})
    found.extend(f"feature '{feature}' is not served" for feature in unknown)
    return found


def _machine_reasons(there: Facts) -> list[str]:
    if there.rocm:
        return ["this torch is built for ROCm; FlashInfer is for NVIDIA's GPUs"]
    if not there.capabilities:
        return ["no NVIDIA GPU was found: the driver's NVML does not answer"]
    found = (
        [] if there.triton else ["Triton is not installed, in which keys and values are written (pip install triton)"]
    )
    major, minor = max(there.capabilities)  # CUDA takes the fastest GPU first
    if (major, minor) < LEAST_CAPABILITY:
        found.append(f"it needs compute capability 8.0 at least, not {major}.{minor}")
    found += why_not_installed("flashinfer-python", there.version, TESTED)
    if not there.version:
        return found
    if there.cache and numbers_of(there.cache) != numbers_of(there.version):
        found.append(
            f"{CACHE} {there.cache} does not match flashinfer-python {there.version} "
            "(flashinfer install-jit-cache-wheel)"
        )
    elif not there.kernels:
        missing = "ninja, by which it compiles kernels," if there.compiler else "nvcc, which compiles its kernels,"
        found.append(
            f"{missing} is missing, and no compiled ones are installed (flashinfer install-jit-cache-wheel, which "
            "needs the network once)"
        )
    return found
