"""The card of the native attention."""

from __future__ import annotations

import importlib

from engine.interfaces.attention import AttentionCard, AttentionNeed
from engine_cpu.levels import LevelOptions, not_run
from engine_cpu.native import MODULE, TAPE, why_not_built

DTYPES = ("float32", "bfloat16")
CODES = ("int8", "float8_e4m3fn")
"""What a cache may hold beside those: 8 bits, with a scale for each token's key of a head, and for its value."""
SCALE_BYTES = 2
"""Of a scale, in bfloat16: the exponents of float32 in half the bytes, 1.6 % of heads of 128 elements. What it is
rounded by costs nothing: codes are of numbers divided by the rounded scale, and read they are exact in float32."""
FEATURES = frozenset({"kv_index", "tree", "sinks", "alibi", "relative_bias", "two_sided", "lse"})


class CpuAttentionOptions(LevelOptions):
    """Options of `cpu`."""


class CpuAttention(AttentionCard):
    """Paged attention by native kernels, over pages in the order in which they multiply them."""

    priority = 10
    framework = "torch"
    captured_by = frozenset({TAPE})
    batch_invariant = True
    kinds = frozenset({"full", "sliding", "cross", "encoder"})
    Options = CpuAttentionOptions
    body = "engine_cpu.attention_cpu.body:CpuAttentionBody"

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        reasons = why_not_built()
        if not reasons and importlib.import_module(MODULE).levels() == ["scalar"]:
            reasons.append("this processor has neither AVX2 nor NEON, without which plain torch is faster")
        if need.kind not in cls.kinds:
            reasons.append(f"layers of kind '{need.kind}' are not served, only {', '.join(sorted(cls.kinds))}")
        if need.device.partition(":")[0] != "cpu":
            reasons.append(f"it computes on the processor, not on {need.device}")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        kv_dtype = need.dtype if need.kind == "encoder" else need.kv_dtype
        if kv_dtype not in (*DTYPES, *CODES):
            reasons.append(f"a cache of {kv_dtype} is not served, only of {', '.join((*DTYPES, *CODES))}")
        elif (need.dtype, kv_dtype) == ("bfloat16", "float32"):
            reasons.append("a cache of float32 under queries of bfloat16 saves no memory")
        if kv_dtype in ("bfloat16", *CODES):
            # The pages hold pairs of elements, and of tokens.
            if need.head_size % 2:
                reasons.append(f"heads of {need.head_size} elements, an odd number, are not served in {kv_dtype}")
            if need.kind != "encoder" and need.block_size % 2:
                reasons.append(f"blocks of {need.block_size} tokens, an odd number, are not served in {kv_dtype}")
        reasons.extend(f"feature '{feature}' is not served" for feature in sorted(need.features - FEATURES))
        if need.features >= {"tree", "alibi"}:
            reasons.append("slopes are not served with trees of drafts (features 'alibi' and 'tree')")
        if need.features >= {"tree", "relative_bias"}:
            reasons.append("relative biases are not served with trees of drafts (features 'relative_bias' and 'tree')")
        return reasons

    @classmethod
    def scale_bytes(cls, need: AttentionNeed) -> int:
        return SCALE_BYTES if need.kind != "encoder" and need.kv_dtype in CODES else 0

    @classmethod
    def remarks(cls, need: AttentionNeed) -> list[str]:
        slow = ["the keys of a long row are not divided among threads, so that its bits depend on nothing else"]
        return [*not_run(), *(slow if need.batch_invariant else [])]
