"""The card of the attention in Triton."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import BaseModel, ConfigDict

from engine.interfaces.attention import AttentionCard, AttentionNeed
from engine_cuda.attention_reasons import FP8, wrong_capability
from engine_cuda.interpreter import wrong_device
from engine_cuda.seen import RAN

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""With the bytes of an element."""
FEATURES = frozenset({"kv_index", "tree", "sinks", "alibi", "lse"})
LARGEST_HEAD = 256


class TritonAttentionOptions(BaseModel):
    """Options of `triton`.

    Attributes:
        split_kv: divide the keys of long rows among programs, so that few rows use the whole GPU. How many keys go
            together follows from the whole step; without it a row's result has the same bits whatever stands beside it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    split_kv: bool = True


class TritonAttention(AttentionCard):
    """Paged attention in Triton: prompts, decodes and short extends in one step, divided on the device; fp8 caches."""

    priority = 5  # before torch's; after what is made for the processor, where kernels are only interpreted
    framework = "torch"
    kinds = frozenset({"full", "sliding", "cross", "encoder"})
    Options = TritonAttentionOptions
    body = "engine_cuda.attention_triton.body:TritonAttentionBody"

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        reasons = wrong_device(need.device)
        if not reasons and find_spec("triton") is None:
            reasons.append("Triton is not installed (pip install triton)")
        if need.kind not in cls.kinds:
            reasons.append(f"layers of kind '{need.kind}' are not served, only {', '.join(sorted(cls.kinds))}")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        kv_dtype = need.dtype if need.kind == "encoder" else need.kv_dtype
        if kv_dtype not in (*DTYPES, FP8):
            reasons.append(f"a cache of {kv_dtype} is not served, only of {', '.join((*DTYPES, FP8))}")
        elif kv_dtype != need.dtype and DTYPES.get(kv_dtype, 1) >= DTYPES.get(need.dtype, 0):
            reasons.append(f"a cache of {kv_dtype} under queries of {need.dtype} saves no memory")
        reasons.extend(wrong_capability(need))
        if need.head_size > LARGEST_HEAD:
            reasons.append(f"heads of {need.head_size} elements are not served, only up to {LARGEST_HEAD}")
        reasons.extend(f"feature '{feature}' is not served" for feature in sorted(need.features - FEATURES))
        if need.features >= {"tree", "alibi"}:
            reasons.append("slopes are not served with trees of drafts (features 'alibi' and 'tree')")
        return reasons

    @classmethod
    def remarks(cls, need: AttentionNeed) -> list[str]:
        return [RAN]
