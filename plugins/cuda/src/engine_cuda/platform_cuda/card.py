"""The card of the platform `cuda`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engine.interfaces.platform import PlatformCard, PlatformFacts, PlatformNeed
from engine_cuda.machine import machine
from engine_cuda.platform_cuda.reasons import dtypes_of, name_of, why_not
from engine_cuda.seen import RAN

Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1)]
"""Of rows or tokens."""


BIG = 60 << 30
"""Bytes of memory of a GPU for which larger steps are the default."""


class CudaPlatformOptions(BaseModel):
    """Options of `cuda`.

    Attributes:
        capture: "auto" captures decode steps as CUDA graphs where all drivers of a step can be, and goes without, with
            a warning, where one turns out to do something else; "always" makes that an error; "never" captures nothing.
        capture_mixed: the tokens that steps with prompts in them are padded up to, each captured once, so that their
            launches do not hold up the rows that decode beside; "auto" takes every 64th up to 512 and every 128th up to
            1,024, as far as a step of this model is estimated to take the GPU less time than its launches take the host
            (some 200 for a hidden size of 4,096), and at least 128 tokens; "never" captures none of them. Larger steps
            run as they are, and with a drafter none is captured.
        capture_whole: "auto" captures decode steps a second time, with what is launched before and behind the model:
            inputs, attention's plans, draws. Steps in which all rows only draw are replayed so; those with penalties,
            log probabilities, logits processors, masks, drafts or `min_tokens` among them as without. Where it cannot
            be, a warning says why; with `capture` "always" the start fails. "never" leaves that.
        buckets: numbers of rows that decode steps are padded up to, each captured once; "auto" takes 1, 2, 4, then
            every 8th up to 256 and every 16th up to 512, as far as so many requests run at once; of rows with drafts
            those of 512 tokens at most.
        dependents: "auto" lets kernels that wait by themselves for what they read begin while the one before runs,
            where the GPU can (compute capability 9.0 and later); "never" launches one after the other.
        ranks_per_device: how many ranks may share a GPU. With more than one they divide its memory, and rank i has
            GPU i / ranks_per_device: for tests, it is slower than one rank.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    capture: Literal["auto", "always", "never"] = "auto"
    capture_mixed: Literal["auto", "never"] | Counts = "auto"
    capture_whole: Literal["auto", "never"] = "never"
    buckets: Literal["auto"] | Counts = "auto"
    dependents: Literal["auto", "never"] = "never"
    ranks_per_device: Annotated[int, Field(ge=1, le=8)] = 1

    @field_validator("buckets", "capture_mixed", mode="before")
    @classmethod
    def _with_commas(cls, given: Any) -> Any:
        """ "1,2,4", as the command line has it."""
        return given.split(",") if isinstance(given, str) and given not in ("auto", "never") else given


class CudaPlatform(PlatformCard):
    """GPUs: NVIDIA's through CUDA, and AMD's, which torch's ROCm builds call by the same names."""

    priority = 20
    requires_minor = 7  # with it new pages came to whole steps
    framework = "torch"
    Options = CudaPlatformOptions
    recorder = "stream"
    captures_drafts = "padded"
    captures_mixed = True
    step_timeout = 300.0  # for milliseconds of work, or a step that compiles its kernels first
    body = "engine_cuda.platform_cuda.body:CudaPlatformBody"

    @classmethod
    def unsupported(cls, need: PlatformNeed) -> list[str]:
        return why_not(machine(), need.dtype)

    @classmethod
    def describe(cls) -> PlatformFacts:
        facts = machine()
        return PlatformFacts(device="cuda", name=name_of(facts), dtypes=dtypes_of(facts))

    @classmethod
    def memory(cls) -> int | None:
        """Of the smallest GPU."""
        used = machine().used
        return None if used is None else min(gpu.total_bytes for gpu in used.visible) or None

    @classmethod
    def step_tokens(cls) -> int:
        """8,192 on a GPU of a data center, whose products have to be larger to be busy; it has the memory for them."""
        return 8192 if (cls.memory() or 0) >= BIG else super().step_tokens()

    @classmethod
    def remarks(cls, need: PlatformNeed) -> list[str]:
        facts = machine()
        if facts.torch is not None and facts.torch.rocm:
            return ["it was not run on a GPU of AMD's yet: `make gpu-check` tries it"]
        return [RAN]
