"""The card of experts that stay where their tokens are."""

from __future__ import annotations

from engine.interfaces.experts import ExpertsCard, ExpertsNeed


class LocalExperts(ExpertsCard):
    """Every rank holds a part of each expert, as of a dense block: no token leaves its rank."""

    framework = "torch"
    batch_invariant = True
    body = "engine_moe.experts_local.body:LocalExpertsBody"

    @classmethod
    def unsupported(cls, need: ExpertsNeed) -> list[str]:
        whole = "whole experts are to be dealt over ranks (--enable-expert-parallel), and it divides each of them"
        return [whole] if need.parallel.ep else []
