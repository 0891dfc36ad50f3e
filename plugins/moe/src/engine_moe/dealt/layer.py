"""A layer's experts dealt whole over ranks: which of them a rank holds, and who computes whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.interfaces.communicator import Group
from engine.interfaces.model import ModelContext
from engine.modeling import Module
from engine.modeling.parallel import group_of
from engine.types.errors import ConfigError
from engine.types.parallel import Shard
from engine_kit.expert_weights import ExpertWeights
from engine_kit.routing import ExpertSpec
from engine_moe.dealt.placement import first_placement, starts_of, table_of, table_width


class DealtLayer(Module):
    """See `engine.interfaces.experts.ExpertLayer`.

    Args:
        body: which makes it; its `start` and `options`.

    Attributes:
        ep, cores, group: the ranks over which experts are dealt; of these the same one in each engine core, and those
            of this core. None for one.
        placement: int32 [places]; the expert at each, now. starts: the first place of each rank, and their end.
        table, loads: int32 [experts, turns], int64 [places of this rank], device; see operation `place_experts`.
    """

    def __init__(self, body: Any, context: ModelContext, spec: ExpertSpec) -> None:
        parallel, redundant = body.start.parallel, body.options.redundant
        self.group = group_of(context)
        self.ep: Group | None = context.groups.get("ep")
        self.cores: Group | None = context.groups.get("dp")
        ranks, rank = (1, 0) if self.ep is None else (self.ep.size, self.ep.rank)
        redundant = redundant if ranks > 1 else 0  # a draft model's, say, that every rank has whole
        asked = f"deal {spec.num_experts} experts ({spec.last}) over {ranks} ranks"
        if spec.num_experts < ranks:
            raise ConfigError(asked, "some ranks would have none", "use fewer ranks, or leave --enable-expert-parallel")
        if redundant > spec.num_experts * (ranks - 1):
            found = f"with experts.redundant={redundant} ranks would have the same expert twice"
            raise ConfigError(asked, found, f"ask for at most {spec.num_experts * (ranks - 1)}")
        if parallel.dp > 1 and context.target is not None:
            found = f"{parallel.dp} engine cores share them, and a draft model is not computed by all at once"
            raise ConfigError(asked, found, "leave the drafter out, or --enable-expert-parallel")
        self._ops: Any = context.ops
        self.starts = starts_of(spec.num_experts + redundant, ranks)
        self.placement = first_placement(spec.num_experts, int(self.starts[-1]))
        self.first, end = int(self.starts[rank]), int(self.starts[rank + 1])
        self._width = table_width(min(ranks, 1 + redundant))
        self.table = torch.empty(spec.num_experts, self._width, dtype=torch.int32, device=context.device)
        self.loads = torch.zeros(end - self.first, dtype=torch.int64, device=context.device)
        self._total = np.zeros(spec.num_experts, np.int64)
        mine = self.placement[self.first : end].tolist()
        self.weights = ExpertWeights(context, spec, mine, Shard.of(spec.inner_size), True)
        self._others = () if spec.stacked else tuple(set(range(spec.num_experts)) - set(mine))
        self._names = (*spec.first, spec.last)
        self._one = mine[0]
        self.place()

    def tolerated(self) -> frozenset[str]:
        """The tensors of experts that other ranks hold."""
        found = set()
        for linear in (self.weights.first[0], self.weights.last[0]):
            for param in linear.params():
                for name in self._names:
                    own = name.replace("{}", str(self._one)) + "."
                    if param.name.startswith(own):
                        found |= {
                            f"{name.replace('{}', str(other))}.{param.name[len(own) :]}" for other in self._others
                        }
        return frozenset(found)

    @property
    def experts(self) -> int:
        """Of the layer, all ranks together."""
        return len(self._total)

    def place(self) -> None:
        """Take tokens to where `placement` says, from the next step on."""
        self.table.copy_(torch.from_numpy(table_of(self.placement, self.experts, self._width)))

    def count(self) -> np.ndarray:
        """int64 [experts]: the tokens that this rank has computed. To be called before `placement` changes."""
        mine = self.placement[self.first : self.first + len(self.loads)]
        np.add.at(self._total, mine, self.loads.cpu().numpy())
        self.loads.zero_()
        return self._total

    def forget(self) -> None:
        """Count from zero."""
        self.loads.zero_()
        self._total[:] = 0

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int32 [T, k] of experts -> of places of this rank, its number of places for those of others."""
        found: torch.Tensor = self._ops.place_experts(ids, self.table, self.first, self.loads)
        return found

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights [T, k] -> [T, H]."""
        raise NotImplementedError
