"""The card of the native operations."""

from __future__ import annotations

import importlib

from engine.interfaces.ops import OpsCard, OpsNeed
from engine_cpu.levels import LevelOptions, not_run
from engine_cpu.native import MODULE, TAPE, why_not_built

DTYPES = ("float32", "bfloat16")
STATES = frozenset({"causal_conv", "selective_scan", "ssd", "gated_delta", "gated_norm", "gate_by", "join"})
"""Of layers that keep states: what engine-states defines."""


class CpuOpsOptions(LevelOptions):
    """Options of `cpu`."""


class CpuOps(OpsCard):
    """The layers between attention and sampling, by native kernels."""

    priority = 10
    framework = "torch"
    Options = CpuOpsOptions
    captured_by = frozenset({TAPE})
    batch_invariant = True
    operations = frozenset(
        {
            *("embedding", "embedding_part", "gather_rows", "add", "scale", "soft_cap", "gelu", "silu_mul"),
            *("gelu_mul", "relu", *STATES),
            *("rms_norm", "add_rms_norm", "layer_norm", "rope", "qk_norm_rope", "pack_linear", "linear"),
            *("lora_memory", "lora_pack", "lora_place", "lora_add"),
            *("router_logits", "route", "pack_experts", "experts", "place_experts", "gated_act", "moe_gate"),
            *("prepare_inputs", "check_logits", "penalties", "apply_bitmask", "sample", "place_tokens", "logprobs"),
            "verify",
        }
    )
    body = "engine_cpu.ops_cpu.body:CpuOpsBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        reasons = why_not_built()
        if not reasons and importlib.import_module(MODULE).levels() == ["scalar"]:
            reasons.append("this processor has neither AVX2 nor NEON, without which plain torch is faster")
        if need.operation not in cls.operations:
            reasons.append(f"operation '{need.operation}' is not one of its own")
        if need.device.partition(":")[0] != "cpu":
            reasons.append(f"it computes on the processor, not on {need.device}")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        return reasons

    @classmethod
    def remarks(cls, need: OpsNeed) -> list[str]:
        return not_run()
