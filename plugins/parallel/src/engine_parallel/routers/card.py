"""The cards of the routers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.router import RouterCard, RouterNeed


class LoadOptions(BaseModel):
    """Options of `least_loaded`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_weight: float = Field(
        32.0, ge=0, description="how many running sequences a full KV cache counts for; 0 leaves it out"
    )


class PrefixOptions(LoadOptions):
    """Options of `prefix_aware`."""

    min_match: float = Field(
        0.1, gt=0, le=1, description="a prefix is followed from this part of the prompt on; less goes by load alone"
    )
    slack: float = Field(
        32.0, ge=0, description="a rank is offered for its prefix while its load is at most this much above the least"
    )
    slack_ratio: float = Field(
        0.5, ge=0, description="or at most this part of the least load above it, where that is more"
    )


class LeastLoadedRouter(RouterCard):
    """Takes the rank with the lowest load: waiting x 4 + running, and a term for the KV cache in use."""

    body = "engine_parallel.routers.least_loaded:LeastLoaded"
    Options = LoadOptions


class PrefixAwareRouter(RouterCard):
    """Takes the rank that most likely holds the prompt's prefix, unless it has much more to do than others."""

    priority = -10
    body = "engine_parallel.routers.prefix_aware:PrefixAware"
    Options = PrefixOptions

    @classmethod
    def unsupported(cls, need: RouterNeed) -> list[str]:
        return [] if need.enable_prefix_caching else ["prefix caching is off, so no rank keeps a prefix"]
