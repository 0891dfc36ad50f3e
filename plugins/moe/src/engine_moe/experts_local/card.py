"""The card of experts that stay where their tokens are."""

from __future__ import annotations

from engine.interfaces.experts import ExpertsCard


class LocalExperts(ExpertsCard):
    """Every rank holds a part of each expert, as of a dense block: no token leaves its rank."""

    framework = "torch"
    batch_invariant = True
    body = "engine_moe.experts_local.body:LocalExpertsBody"
