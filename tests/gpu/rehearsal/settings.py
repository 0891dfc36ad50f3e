"""What is rehearsed: settings of the engine, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

BASE: dict[str, Any] = {
    "platform": "cuda",
    "ops": "triton",
    "attention": "triton",
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "seed": 0,
}
SMALL = "dummy:0.6B"
"""The largest: weights take no memory here, yet what goes through the host on its way may."""
DRAFTS = {"drafter": "ngram", "drafter.num_tokens": 3, "drafter.min_match": 1}


class Setting(NamedTuple):
    """One.

    Args:
        name: to ask for it with.
        model: of the engine.
        changes: of BASE.
        sampled: draws with temperature, top-k, top-p and a seed, or greedily.
        served: over HTTP, or offline step by step.
        arrive: steps in which a prompt is computed beside rows that decode, too.
    """

    name: str
    model: str = SMALL
    changes: Mapping[str, Any] = MappingProxyType({})
    sampled: bool = False
    served: bool = False
    arrive: bool = False


SETTINGS = (
    Setting("greedy", arrive=True),
    Setting("whole", changes={"platform.capture_whole": "auto"}, arrive=True),
    Setting("whole-sampled", changes={"platform.capture_whole": "auto"}, sampled=True),
    Setting("few-rows", changes={"ops": "triton_gemv,triton"}),
    Setting("timed", changes={"ops": "triton_gemv,triton", "ops.choose": "time", "ops.cache": ""}),
    Setting("sampled", sampled=True),
    Setting("drafts", changes=DRAFTS),
    Setting("fp8-cache", changes={"kv_cache_dtype": "fp8"}),
    Setting("fp8", changes={"quantization": "linear=fp8"}, arrive=True),
    Setting("mla", "dummy:mla-2.6B,layers=2", {"attention": "mla"}),
    Setting("whole-mla", "dummy:mla-2.6B,layers=2", {"attention": "mla", "platform.capture_whole": "auto"}),
    Setting("serve", served=True),
)
