"""Ways to divide experts with one planted fault each, in the place of the body of engine-moe."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mutant_suites import suites_of

from engine_moe.dealt.gather import GatherBody, GatherLayer
from engine_moe.experts_local.body import LocalExpertsBody, LocalLayer
from engine_sdk.conformance import ExpertsConformance


class _Broken(LocalExpertsBody):
    layer_class: type[LocalLayer] = LocalLayer

    def layer(self, context: Any, spec: Any) -> LocalLayer:
        return self.layer_class(context, spec)


class SumsNothing(_Broken):
    """every rank keeps its own part of the sum"""

    class layer_class(LocalLayer):
        def __init__(self, context: Any, spec: Any) -> None:
            super().__init__(context, spec)
            self._group = None


class BiasOnEveryRank(_Broken):
    """every rank adds the biases of the last projection"""

    class layer_class(LocalLayer):
        def __init__(self, context: Any, spec: Any) -> None:
            super().__init__(context, spec)
            from engine_kit.expert_weights import ExpertWeights
            from engine_moe.experts_local.body import even

            inner = even(spec.inner_size, context, spec.last)
            self.weights = ExpertWeights(context, spec, range(spec.num_experts), inner, True)


class ForgetsWeights(_Broken):
    """what experts give is added up without its weights"""

    class layer_class(LocalLayer):
        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return super().__call__(x, ids, torch.ones_like(weights))


class DropsTokens(_Broken):
    """an expert takes as many tokens as its fair share, and drops the others"""

    class layer_class(LocalLayer):
        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            room, kept = 2 * ids.numel() // 8 + 4, weights.clone()
            for expert in range(8):
                mine = (ids == expert).flatten().nonzero().flatten()
                kept.view(-1)[mine[room:]] = 0
            return super().__call__(x, ids, kept)


class FirstExpertAlone(_Broken):
    """only the first expert of each token is computed"""

    class layer_class(LocalLayer):
        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return super().__call__(x, ids[:, :1].contiguous(), weights[:, :1].contiguous())


class WritesIntoTokens(_Broken):
    """the result is written over the tokens"""

    class layer_class(LocalLayer):
        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            found = super().__call__(x, ids, weights)
            return x.copy_(found)


class FailsWithoutTokens(_Broken):
    """a step without a token is not computed"""

    class layer_class(LocalLayer):
        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            assert len(x), "there is nothing to compute"
            return super().__call__(x, ids, weights)


class HoldsEverything(_Broken):
    """every rank holds all experts whole, and the first one computes"""

    class layer_class(LocalLayer):
        def __init__(self, context: Any, spec: Any) -> None:
            from engine.types.parallel import Shard
            from engine_kit.expert_weights import ExpertWeights

            self._group = context.group
            self._first = context.tp_rank == 0
            self.weights = ExpertWeights(context, spec, range(spec.num_experts), Shard.of(spec.inner_size), True)

        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return super().__call__(x, ids, weights * self._first)


class StaysPlain(_Broken):
    """the quantization of experts is passed over"""

    def layer(self, context: Any, spec: Any) -> LocalLayer:
        context.quantization = {}
        return LocalLayer(context, spec)


class IgnoresTheAct(_Broken):
    """silu stands between all projections that have gates"""

    def layer(self, context: Any, spec: Any) -> LocalLayer:
        act = spec.act._replace(kind="silu") if spec.act.gated else spec.act
        return LocalLayer(context, spec._replace(act=act))


DIVIDED = [
    SumsNothing, BiasOnEveryRank, ForgetsWeights, DropsTokens, FirstExpertAlone, WritesIntoTokens, FailsWithoutTokens,
    HoldsEverything, StaysPlain, IgnoresTheAct,
]  # fmt: skip


class _Dealt(GatherBody):
    """Of those that deal whole experts."""


class NeighboursExpert(_Dealt):
    """a token that is another core's goes to the expert beside the one that it chose"""

    class layer_class(GatherLayer):
        def local(self, ids: torch.Tensor) -> torch.Tensor:
            found = super().local(ids)
            if self.cores is not None:
                found = torch.where(found == len(self.loads) - 1, found - 1, found)
            return found


class WeighsTwice(_Dealt):
    """the experts' weights are applied once more to their sum"""

    class layer_class(GatherLayer):
        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return super().__call__(x, ids, weights) * weights.sum(1, keepdim=True)


class CopiesTwice(_Dealt):
    """all copies of an expert compute a token, and not the one whose turn it is"""

    class layer_class(GatherLayer):
        def local(self, ids: torch.Tensor) -> torch.Tensor:
            found = super().local(ids)
            mine = self.placement[self.first : self.first + len(self.loads)].tolist()
            for place, expert in enumerate(mine):
                found = torch.where(ids == expert, place, found)
            return found


class LateOnOneRank(_Dealt):
    """the last rank takes tokens to where experts were before they moved, one step longer than the others"""

    class layer_class(GatherLayer):
        def place(self) -> None:
            if self.ep is None or self.ep.rank < self.ep.size - 1 or not hasattr(self, "seen"):
                self.seen = True
                super().place()
            else:
                self.due = 2

        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            self.due = getattr(self, "due", 0) - 1
            if not self.due:
                super().place()
            return super().__call__(x, ids, weights)


class CountsEverybodys(_Dealt):
    """each rank counts all tokens, and not those that it computes"""

    class layer_class(GatherLayer):
        def local(self, ids: torch.Tensor) -> torch.Tensor:
            np.add.at(self._total, ids.flatten().numpy(), 1)
            return super().local(ids)


class LosesDrafts(_Dealt):
    """every core takes the others for having as many tokens as itself"""

    class layer_class(GatherLayer):
        def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self.cores is not None:
                self.cores.tokens = None
            return super().__call__(x, ids, weights)


DEALT = [NeighboursExpert, WeighsTwice, CopiesTwice, LateOnOneRank, CountsEverybodys, LosesDrafts]

MUTANTS = DIVIDED + DEALT

globals().update(suites_of(ExpertsConformance, "local", DIVIDED))
globals().update(
    suites_of(ExpertsConformance, "gather", DEALT, {"redundant": 3, "rebalance_every": 2, "step_bytes": 1})
)
