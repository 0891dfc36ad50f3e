"""The card of executor `process`."""

from __future__ import annotations

import sys

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.executor import ExecutorCard, ExecutorNeed


class ProcessOptions(BaseModel):
    """Set as `--executor.step_timeout 60`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_timeout: float | None = Field(
        None,
        gt=0,
        description="seconds after which a step (or call) without an answer means that a rank hangs (default: half of "
        "--step-timeout, so that the rank is named)",
    )
    start_timeout: float = Field(1800.0, gt=0, description="seconds that the ranks may take to load the model")
    threads: int | None = Field(
        None, ge=1, description="processor threads of each rank (default: the engine core's share, divided by them)"
    )


class ProcessExecutor(ExecutorCard):
    """Runs each rank in a process of its own, on the machines that `--nodes` knows. `auto` takes it where one process
    cannot do."""

    priority = -10
    apart = True
    requires_minor = 2
    body = "engine_reference.executor_process.body:Process"
    Options = ProcessOptions

    @classmethod
    def unsupported(cls, need: ExecutorNeed) -> list[str]:
        if sys.platform == "win32":
            return ["it speaks to its processes over Unix sockets, which Windows has not"]
        return []
