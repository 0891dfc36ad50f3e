"""The card of scheduling policy `priority`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.scheduling_policy import SchedulingPolicyCard


class PriorityOptions(BaseModel):
    """Options of `priority`.

    Attributes:
        aging_seconds: how long a request waits until it goes before one that is a level more urgent and came just now;
            None: for ever, so that urgent traffic may starve the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    aging_seconds: float | None = Field(default=None, gt=0.0, le=1e6)


class PriorityPolicy(SchedulingPolicyCard):
    """The lowest `priority` value first, then first come, first served; preempts the other way round."""

    priority = -10  # chosen by name: without priorities in the requests it is `fcfs` at a higher cost
    orders_by_priority = True
    Options = PriorityOptions
    body = "engine_reference.policy_priority.body:Priority"
