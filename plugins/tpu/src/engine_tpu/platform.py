"""The card of platform `tpu`: what can be known of the device without JAX."""

from __future__ import annotations

from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.interfaces.platform import PlatformCard, PlatformFacts, PlatformNeed
from engine_kit.host_processor import best_dtypes, cores, processor
from engine_reference.logits_processors.card import (
    AllowedTokenIdsProcessor,
    BadWordsProcessor,
    LogitBiasProcessor,
    ThinkingBudgetProcessor,
)

DTYPES = ("bfloat16", "float32", "float64")
"""What the worker computes in. float64 is for tests: a TPU emulates it."""
_DEVICES = ("accel0", "vfio/0", "vfio/devices/vfio0")
"""Files under /dev, one of which a machine with TPUs has."""
OWN_POINTS = frozenset({"attention", "experts", "logits_processor", "ops", "quantization"})


class TpuOptions(BaseModel):
    """Options of `tpu`.

    Attributes:
        device: "tpu"; "cpu" is XLA's processor device, of any machine.
        rows: how many rows decode steps are padded up to, ascending, e.g. "1,8,64"; "": powers of two.
        tokens: the same of tokens, for steps with prompts or drafts.
        tensor_parallel: over how many devices the model is divided, by one worker.
        expert_parallel: routed experts are dealt to them whole, and not each of them divided.
        weights: "int8" or "fp8" (e4m3) rounds matrices while they are loaded, with a scale for each output.
        attention: "pallas", the kernel, which off a TPU is interpreted and slow; "xla"; "auto": on a TPU the kernel,
            where it can serve the model's heads.
        warm_up: compile every bucket before the first request; else each when it is first met.
        cache_dir: where compiled steps are kept for the next start; "": nowhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["tpu", "cpu"] = "tpu"
    tensor_parallel: int = Field(default=1, ge=1, le=256)
    expert_parallel: bool = False
    weights: Literal["auto", "int8", "fp8"] = "auto"
    attention: Literal["auto", "pallas", "xla"] = "auto"
    rows: str = Field(default="", pattern=r"^(\d+(,\d+)*)?$")
    tokens: str = Field(default="", pattern=r"^(\d+(,\d+)*)?$")
    warm_up: bool = True
    cache_dir: str = "~/.cache/engine-tpu"

    @field_validator("rows", "tokens")
    @classmethod
    def _ascending(cls, value: str) -> str:
        sizes = sizes_of(value)
        if sizes != sorted(set(sizes)) or 0 in sizes:
            raise ValueError(f"{value!r} is not a list of ascending numbers from 1 on")
        return value


def sizes_of(value: str) -> list[int]:
    """The numbers of a list such as "1,8,64"; none of ""."""
    return [int(size) for size in value.split(",") if size]


class TpuPlatform(PlatformCard):
    """TPUs, or the processor, by JAX. Named, never found by `auto`: nobody has seen it on a TPU yet."""

    by_name = True
    framework = "jax"
    worker = "engine_tpu.worker:JaxWorker"
    body = worker
    own_points = OWN_POINTS
    requires_minor = 6
    Options = TpuOptions

    @classmethod
    def unsupported(cls, need: PlatformNeed) -> list[str]:
        reasons = []
        if find_spec("jax") is None:
            reasons.append("JAX is not installed: pip install jax, or on a machine with TPUs pip install 'jax[tpu]'")
        if need.dtype != "auto" and need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        return reasons

    @classmethod
    def describe(cls) -> PlatformFacts:
        if any((Path("/dev") / name).exists() for name in _DEVICES):
            return PlatformFacts(device="xla", name="TPU", dtypes=DTYPES, framework="jax")
        name, features = processor()
        dtypes = tuple(dtype for dtype in best_dtypes(features) if dtype in DTYPES)
        return PlatformFacts(device="xla", name=f"XLA on {name}, {cores()} cores", dtypes=dtypes, framework="jax")

    @classmethod
    def remarks(cls, need: PlatformNeed) -> list[str]:
        """What has been seen of it."""
        return ["it has run on XLA's processor device alone: no TPU has been seen"]

    @classmethod
    def logits_processors(cls) -> tuple[type[LogitsProcessorCard], ...]:
        """Those of the reference drivers: `engine_tpu.edits` honours what they do."""
        cards = AllowedTokenIdsProcessor, BadWordsProcessor, LogitBiasProcessor, ThinkingBudgetProcessor
        return cast("tuple[type[LogitsProcessorCard], ...]", cards)

    @classmethod
    def tokens_per_page(cls, kind: str, block_size: int) -> int:
        """Whole tiles: a TPU's are 16 tokens of bfloat16."""
        return lcm(16, block_size)

    @classmethod
    def page_format(cls, options: TpuOptions) -> str:
        """See `engine_tpu.pages`: the same on any mesh, and for any attention."""
        return f"jax-heads weights={options.weights}"
