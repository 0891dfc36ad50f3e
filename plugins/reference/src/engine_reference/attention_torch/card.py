"""The cards of the reference attention."""

from __future__ import annotations

from engine.interfaces.attention import AttentionCard, AttentionNeed

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""With the bytes of an element."""
FP8 = "float8_e4m3fn"
"""What a cache may hold beside those: one byte an element, with scales of 1."""
FEATURES = frozenset({"kv_index", "tree", "sinks", "alibi", "relative_bias", "two_sided", "lse"})


class TorchAttention(AttentionCard):
    """Attention in plain torch, for any head size, window, soft cap and device: the oracle of faster drivers."""

    priority = 0
    framework = "torch"
    kinds = frozenset({"full", "sliding", "cross", "encoder"})
    body = "engine_reference.attention_torch.attention:TorchAttentionBody"

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        reasons = []
        if need.kind not in cls.kinds:
            reasons.append(f"layers of kind '{need.kind}' are not served, only {', '.join(sorted(cls.kinds))}")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(sorted(DTYPES))}")
        if need.kv_dtype not in (*DTYPES, FP8):
            reasons.append(f"a cache of {need.kv_dtype} is not served, only of {', '.join(sorted((*DTYPES, FP8)))}")
        elif need.kv_dtype != need.dtype and DTYPES.get(need.kv_dtype, 1) >= DTYPES.get(need.dtype, 0):
            reasons.append(f"a cache of {need.kv_dtype} under queries of {need.dtype} saves no memory")
        reasons.extend(f"feature '{feature}' is not served" for feature in sorted(need.features - FEATURES))
        return reasons


class TorchLatentAttention(AttentionCard):
    """Latent attention (DeepSeek) in plain torch, for any sizes and device: the oracle of faster drivers."""

    priority = 0
    framework = "torch"
    kinds = frozenset({"mla"})
    body = "engine_reference.attention_torch.latent:TorchLatentAttentionBody"

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        if need.kind not in cls.kinds:
            return [f"layers of kind '{need.kind}' are not served, only mla"]
        reasons = []
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(sorted(DTYPES))}")
        if need.kv_dtype not in (*DTYPES, FP8):
            reasons.append(f"a cache of {need.kv_dtype} is not served, only of {', '.join(sorted((*DTYPES, FP8)))}")
        elif need.kv_dtype != need.dtype and DTYPES.get(need.kv_dtype, 1) >= DTYPES.get(need.dtype, 0):
            reasons.append(f"a cache of {need.kv_dtype} under queries of {need.dtype} saves no memory")
        if need.soft_cap is not None:
            reasons.append("a soft cap of scores is not served, no latent attention has one")
        reasons.extend(f"feature '{feature}' is not served" for feature in sorted(need.features - {"kv_index", "lse"}))
        return reasons
