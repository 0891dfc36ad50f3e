"""Every rank computes its experts for all tokens of all ranks.

Ranks of one engine core have the same tokens as it is, so there one sum over them follows, as of tensor parallel.
Engine cores gather each other's tokens before, and each gets the sum of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine_moe.dealt.body import DealtBody
from engine_moe.dealt.layer import DealtLayer


class GatherLayer(DealtLayer):
    """See `engine.interfaces.experts.ExpertLayer`."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights [T, k] -> [T, H]."""
        cores = self.cores
        if cores is None:
            routed = self.weights(x, self.local(ids), weights)
        else:
            sizes = [len(x)] * cores.size if cores.tokens is None else list(cores.tokens)
            more = sizes[cores.rank] - len(x)  # of drafts that were planned, and not found
            given = [F.pad(tensor, (0, 0, 0, more)) if more else tensor for tensor in (x, ids, weights)]
            x_all, ids_all, weights_all = (cores.all_gather(tensor, 0, sizes) for tensor in given)
            routed = cores.reduce_scatter(self.weights(x_all, self.local(ids_all), weights_all), 0, sizes)[: len(x)]
        return routed if self.group is None else self.group.all_reduce(routed)


class GatherBody(DealtBody):
    """See `engine.interfaces.experts.Experts`."""

    layer_class = GatherLayer
