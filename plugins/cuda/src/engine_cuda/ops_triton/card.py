"""The card of the operations in Triton."""

from __future__ import annotations

from importlib.util import find_spec

from engine.interfaces.ops import OpsCard, OpsNeed
from engine_cuda.interpreter import wrong_device
from engine_cuda.seen import COMPILED, RAN

DTYPES = ("bfloat16", "float16", "float32")
LATER = frozenset(
    {
        *("router_logits", "route", "pack_experts", "experts", "place_experts", "gated_act", "moe_gate"),
        *("lora_memory", "lora_pack", "lora_place", "lora_add", "draw"),
    }
)
"""What was written after the suite ran on a GPU."""


class TritonOps(OpsCard):
    """The operations of a step that torch would launch as several kernels each, or not without waiting for the device.

    Left to the drivers after it: `linear` with `pack_linear`, `add` and `scale`, which torch launches as one kernel of
    its own, the product through cuBLAS (hipBLASLt on ROCm).
    """

    priority = 5  # before torch's; after what is made for the processor, where kernels are only interpreted
    framework = "torch"
    operations = frozenset(
        {
            *("embedding", "embedding_part", "gather_rows", "soft_cap", "gelu", "silu_mul"),
            *("rms_norm", "add_rms_norm", "layer_norm", "rope", "qk_norm_rope", "check_logits", "prepare_inputs"),
            # engine-moe defines these
            *("router_logits", "route", "pack_experts", "experts", "place_experts", "gated_act", "moe_gate"),
            *("lora_memory", "lora_pack", "lora_place", "lora_add"),  # engine-lora defines them
            *("causal_conv", "selective_scan", "ssd", "gated_delta"),  # engine-states defines them
            *("penalties", "mask_tokens", "apply_bitmask"),
            *("draw", "sample", "reject", "verify", "place_tokens", "logprobs"),
        }
    )
    body = "engine_cuda.ops_triton.body:TritonOpsBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        reasons = wrong_device(need.device)
        if not reasons and find_spec("triton") is None:
            reasons.append("Triton is not installed (pip install triton)")
        if need.operation not in cls.operations:
            reasons.append(f"operation '{need.operation}' is not one of its own")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        return reasons

    @classmethod
    def remarks(cls, need: OpsNeed) -> list[str]:
        return [COMPILED if need.operation in LATER else RAN]
