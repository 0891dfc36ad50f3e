"""The card of scheduling policy `fcfs`."""

from __future__ import annotations

from engine.interfaces.scheduling_policy import SchedulingPolicyCard


class FCFSPolicy(SchedulingPolicyCard):
    """First come, first served; preempts the request that was admitted last."""

    body = "engine_reference.policy_fcfs.body:FCFS"
