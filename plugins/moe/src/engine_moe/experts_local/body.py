"""Every rank holds a part of each expert, and one sum over ranks follows the sum over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Module
from engine.modeling.parallel import even, group_of
from engine_kit.expert_weights import ExpertWeights
from engine_kit.routing import ExpertSpec

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class LocalExpertsBody:
    """See `engine.interfaces.experts.Experts`."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    def layer(self, context: ModelContext, spec: ExpertSpec) -> LocalLayer:
        """Raises ConfigError where the inner size cannot be divided evenly over the ranks."""
        return LocalLayer(context, spec)


class LocalLayer(Module):
    """See `engine.interfaces.experts.ExpertLayer`."""

    def __init__(self, context: ModelContext, spec: ExpertSpec) -> None:
        inner = even(spec.inner_size, context, spec.last)
        self._group = group_of(context)
        self.weights = ExpertWeights(context, spec, range(spec.num_experts), inner, context.tp_rank == 0)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights [T, k] -> [T, H]."""
        routed = self.weights(x, ids, weights)
        return routed if self._group is None else self._group.all_reduce(routed)
