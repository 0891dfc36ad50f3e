"""Ways to divide experts with one planted fault each, in the place of the body of engine-moe."""

from __future__ import annotations

from typing import Any

import torch
from mutant_suites import suites_of

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


MUTANTS = [
    SumsNothing, BiasOnEveryRank, ForgetsWeights, DropsTokens, FirstExpertAlone, WritesIntoTokens, FailsWithoutTokens,
    HoldsEverything, StaysPlain, IgnoresTheAct,
]  # fmt: skip

globals().update(suites_of(ExpertsConformance, "local", MUTANTS))
