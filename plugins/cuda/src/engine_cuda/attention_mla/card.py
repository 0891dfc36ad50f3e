"""The card of the latent attention in Triton."""

from __future__ import annotations

from importlib.util import find_spec

from engine.interfaces.attention import AttentionCard, AttentionNeed
from engine_cuda.attention_reasons import FP8, wrong_capability
from engine_cuda.interpreter import wrong_device
from engine_cuda.seen import RAN

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""With the bytes of an element."""
LARGEST_LATENT = 512
LARGEST_ROPE = 128


class TritonLatentAttention(AttentionCard):
    """Latent attention (DeepSeek) in Triton: each cached vector is read once for many heads, as key and as value."""

    priority = 5  # before torch's
    framework = "torch"
    kinds = frozenset({"mla"})
    body = "engine_cuda.attention_mla.body:TritonLatentAttentionBody"

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        if need.kind not in cls.kinds:
            return [f"layers of kind '{need.kind}' are not served, only mla"]
        reasons = wrong_device(need.device)
        if not reasons and find_spec("triton") is None:
            reasons.append("Triton is not installed (pip install triton)")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        if need.kv_dtype not in (*DTYPES, FP8):
            reasons.append(f"a cache of {need.kv_dtype} is not served, only of {', '.join((*DTYPES, FP8))}")
        elif need.kv_dtype != need.dtype and DTYPES.get(need.kv_dtype, 1) >= DTYPES.get(need.dtype, 0):
            reasons.append(f"a cache of {need.kv_dtype} under queries of {need.dtype} saves no memory")
        reasons.extend(wrong_capability(need))
        latent = need.head_size - need.rope_size
        if latent > LARGEST_LATENT:
            reasons.append(f"latents of {latent} elements are not served, only up to {LARGEST_LATENT}")
        if not 0 < need.rope_size <= LARGEST_ROPE:
            reasons.append(f"rotated keys of {need.rope_size} elements are not served, only of 1 to {LARGEST_ROPE}")
        if need.soft_cap is not None:
            reasons.append("a soft cap of scores is not served, no latent attention has one")
        reasons.extend(f"feature '{feature}' is not served" for feature in sorted(need.features - {"kv_index", "lse"}))
        return reasons

    @classmethod
    def remarks(cls, need: AttentionNeed) -> list[str]:
        return [RAN]
