"""Cards of the drivers that are written to be broken. Light, as cards are; some are faulty themselves."""

from __future__ import annotations

from engine.interfaces.attention import AttentionCard, AttentionNeed


class PlainAttention(AttentionCard):
    """Attention, one token after another."""

    framework = "torch"
    batch_invariant = True
    kinds = frozenset({"full", "sliding", "cross", "encoder"})
    body = "plain_attention:Plain"
    features = frozenset({"kv_index", "tree", "sinks", "alibi", "relative_bias", "two_sided", "lse"})

    @classmethod
    def scale_bytes(cls, need: AttentionNeed) -> int:
        return 2 if need.kv_dtype in ("int8", "float8_e4m3fn") and need.kind not in ("mla", "encoder") else 0

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        reasons = []
        if need.kind not in cls.kinds:
            reasons.append(f"layers of kind {need.kind} are not served")
        if need.kind == "mla" and need.kv_dtype == "int8":
            reasons.append("a latent cache of int8 is not served")
        if need.dtype not in ("float64", "float32", "bfloat16", "float16"):
            reasons.append(f"dtype {need.dtype} is not served")
        reasons += [f"feature {feature} is not served" for feature in sorted(need.features - cls.features)]
        return reasons


class PlainLatentAttention(PlainAttention):
    """Latent attention, one token after another."""

    features = frozenset({"kv_index", "sinks", "alibi", "lse"})
    kinds = frozenset({"mla"})
    body = "plain_latent:PlainLatent"


class GivesNoLse(PlainAttention):
    """A sound card, of a driver that cannot say what its scores add up to."""

    features = frozenset({"kv_index", "sinks", "alibi", "relative_bias"})
    body = "mutants_attention:WithoutLse"


class ServesEverything(PlainAttention):
    """the card claims to serve whatever it is asked for"""

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        return []


class Undecided(PlainAttention):
    """the card answers differently when it is asked again"""

    asked = 0

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        cls.asked += 1
        return [f"asked {cls.asked} times"] if need.head_size == 7 else super().unsupported(need)


class NamesNoBody(PlainAttention):
    """the card names a body that is not there"""

    body = "plain_attention:Missing"
