"""The cards of nodes `ray` and executor `ray`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.executor import ExecutorCard, ExecutorNeed
from engine.interfaces.nodes import NodesCard, NodesNeed
from engine_reference.executor_process.card import ProcessOptions

PIP = 'ray is not installed: pip install "ray>=2.50"'


class RayOptions(BaseModel):
    """Set as `--nodes.address 10.0.0.1:6379`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(
        "",
        description="the cluster to join: HOST:PORT, or auto for the one here; one is started where none is named",
    )
    strategy: Literal["PACK", "SPREAD"] = Field("PACK", description="how the placement group deals out its bundles")
    cpus: float = Field(1.0, ge=0, description="Ray's CPUs that each worker reserves")
    env: str = Field(
        "",
        pattern=r"^(\w+=[^,]*(,\w+=[^,]*)*)?$",
        description="environment of cores and workers: NAME=value, with commas between",
    )
    timeout: float = Field(10.0, gt=0, description="seconds without a sign of life after which a connection is lost")
    place_timeout: float = Field(600.0, gt=0, description="seconds to wait for room in the cluster")


class RayNodes(NodesCard):
    """Machines of a Ray cluster: each core and worker is supervised by an actor of its name."""

    by_name = True
    several = True
    Options = RayOptions
    body = "engine_ray.body:Ray"

    @classmethod
    def unsupported(cls, need: NodesNeed) -> list[str]:
        return [] if find_spec("ray") else [PIP]


class RayExecutor(ExecutorCard):
    """Executor `process` with nodes `ray`, under the name that is known from elsewhere."""

    by_name = True
    apart = True
    requires_minor = 2
    nodes = "ray"
    body = "engine_reference.executor_process.body:Process"
    Options = ProcessOptions

    @classmethod
    def unsupported(cls, need: ExecutorNeed) -> list[str]:
        return [] if find_spec("ray") else [PIP]
