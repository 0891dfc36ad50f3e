"""The card of the platform `cpu`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.platform import PlatformCard, PlatformFacts, PlatformNeed
from engine_cpu.native import TAPE, why_not_built
from engine_kit.host_processor import DTYPES, best_dtypes, cores, processor


class CpuPlatformOptions(BaseModel):
    """Options of `cpu`.

    Attributes:
        capture: "auto" captures decode steps where all drivers of a step are recorded, and goes without, with a
            warning, where one turns out to do something else; "always" makes that an error; "never" captures nothing.
        threads: to compute with, in each rank; "auto" takes what the process may (its cores, divided over the ranks of
            the machine, or OMP_NUM_THREADS).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    capture: Literal["auto", "always", "never"] = "auto"
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=255)] = "auto"


class CpuPlatform(PlatformCard):
    """The processor, with decode steps that are recorded once as native calls and replayed without Python."""

    priority = 10
    framework = "torch"
    Options = CpuPlatformOptions
    recorder = TAPE
    skips_padding = True
    captures_drafts = "alike"
    body = "engine_cpu.platform_cpu.body:CpuPlatformBody"

    @classmethod
    def unsupported(cls, need: PlatformNeed) -> list[str]:
        reasons = why_not_built()
        if need.dtype != "auto" and need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        return reasons

    @classmethod
    def describe(cls) -> PlatformFacts:
        name, features = processor()
        return PlatformFacts(device="cpu", name=f"{name}, {cores()} cores", dtypes=best_dtypes(features))

    @classmethod
    def memory(cls) -> int:
        from engine_kit.host_memory import total_memory  # here: it takes a while, and few ask

        return total_memory()
