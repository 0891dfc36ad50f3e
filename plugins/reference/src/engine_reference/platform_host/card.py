"""The card of the host platform: what can be known of the processor without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from engine.interfaces.platform import PlatformCard, PlatformFacts, PlatformNeed
from engine_kit.host_processor import DTYPES, best_dtypes, cores, processor


class HostPlatformOptions(BaseModel):
    """Options of `host`.

    Attributes:
        capture: "never": nothing is captured here, and whoever wants that of any platform may say so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    capture: Literal["never"] = "never"


class HostPlatform(PlatformCard):
    """Any machine, through plain torch on its processor: no capture, no padding, ordinary memory."""

    priority = 0
    framework = "torch"
    Options = HostPlatformOptions
    body = "engine_reference.platform_host.platform:HostPlatformBody"

    @classmethod
    def unsupported(cls, need: PlatformNeed) -> list[str]:
        if need.dtype != "auto" and need.dtype not in DTYPES:
            return [f"dtype {need.dtype} is not one of {', '.join(DTYPES)}"]
        return []

    @classmethod
    def describe(cls) -> PlatformFacts:
        name, features = processor()
        return PlatformFacts(device="cpu", name=f"{name}, {cores()} cores", dtypes=best_dtypes(features))

    @classmethod
    def memory(cls) -> int:
        from engine_kit.host_memory import total_memory  # here: it takes a while, and few ask

        return total_memory()
