"""The cards of the reference attention."""

from __future__ import annotations

from engine.interfaces.attention import AttentionCard, AttentionNeed

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""With the bytes of an element."""
FP8 = "float8_e4m3fn"
"""What a cache may hold beside those: one byte an element. On the processor a token's key of a head has a scale, and
its value another; elsewhere, and in latent attention, scales are 1, as in the drivers whose oracle this is."""
SCALE_BYTES = 2
"""Of a scale: bfloat16."""
FEATURES = frozenset({"kv_index", "tree", "sinks", "alibi", "relative_bias", "two_sided", "lse"})


class TorchAttention(AttentionCard):
    """Attention in plain torch, for any head size, window, soft cap and device: the oracle of faster drivers."""

    priority = 0
    framework = "torch"
    kinds = frozenset({"full", "sliding", "cross", "encoder"})
    body = "engine_reference.attention_torch.attention:TorchAttentionBody"

    @classmethod
    def scale_bytes(cls, need: AttentionNeed) -> int:
        held = need.kind != "encoder" and _on_processor(need)
        return SCALE_BYTES if held and need.kv_dtype in ("int8", FP8) else 0

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        reasons = []
        kv_dtype = need.dtype if need.kind == "encoder" else need.kv_dtype
        held = sorted((*DTYPES, FP8, *["int8"] * _on_processor(need)))
        if need.kind not in cls.kinds:
            reasons.append(f"layers of kind '{need.kind}' are not served, only {', '.join(sorted(cls.kinds))}")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(sorted(DTYPES))}")
        if kv_dtype not in held:
            reasons.append(f"a cache of {kv_dtype} is not served on {need.device}, only of {', '.join(held)}")
        elif kv_dtype != need.dtype and DTYPES.get(kv_dtype, 1) >= DTYPES.get(need.dtype, 0):
            reasons.append(f"a cache of {kv_dtype} under queries of {need.dtype} saves no memory")
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


def _on_processor(need: AttentionNeed) -> bool:
    return need.device.partition(":")[0] == "cpu"
