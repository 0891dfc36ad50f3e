"""Tokens go to the ranks that have their experts, each once to a rank, and what these make of it comes back.

The ranks of an engine core have the same tokens, so each sends its share of them, and they gather what came of it.
"""

from __future__ import annotations

import torch

from engine.modeling.parallel import vocabulary
from engine_moe.dealt.body import DealtBody
from engine_moe.dealt.layer import DealtLayer


class ShufflingLayer(DealtLayer):
    """See `engine.interfaces.experts.ExpertLayer`. Computes this rank's share of its core's tokens by `shuffle`."""

    def shuffle(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights [T, k] of tokens that no other rank has -> [T, H]. All ranks call it,
        also those without any token."""
        raise NotImplementedError

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights [T, k] -> [T, H]."""
        if self.ep is None:
            return self.weights(x, self.local(ids), weights)
        if self.group is None:
            return self.shuffle(x, ids, weights)
        shares = vocabulary(len(x), self.group.size)
        mine = shares[self.group.rank].part
        routed = self.shuffle(x[mine], ids[mine], weights[mine])
        return self.group.all_gather(routed, 0, [share.length for share in shares])


class AllToAllLayer(ShufflingLayer):
    """By the communicator's all-to-all."""

    def shuffle(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Waits for the device: how many tokens go where has to be known."""
        assert self.ep is not None
        turn = torch.arange(len(ids), device=ids.device).unsqueeze(1) % self.table.shape[1]
        places = self.table[ids.long(), turn]
        ends = torch.from_numpy(self.starts[1:]).to(places.device)
        goes = torch.zeros(len(x), self.ep.size, dtype=torch.bool, device=x.device)
        goes.scatter_(1, torch.bucketize(places, ends, right=True), True)
        rank, token = goes.T.nonzero(as_tuple=True)  # by rank, then by token
        send = torch.bincount(rank, minlength=self.ep.size)
        receive = self.ep.all_to_all(send, [1] * self.ep.size, [1] * self.ep.size)
        sent, received = send.tolist(), receive.tolist()
        x_there, places_there, weights_there = (
            self.ep.all_to_all(tensor.index_select(0, token), sent, received) for tensor in (x, places, weights)
        )
        here = places_there - self.first
        here = torch.where((here >= 0) & (here < len(self.loads)), here, len(self.loads))
        self.loads += torch.bincount(here.flatten(), minlength=len(self.loads) + 1)[:-1]
        back = self.ep.all_to_all(self.weights(x_there, here, weights_there), received, sent)
        out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
        for tokens, part in zip(token.split(sent), back.split(sent), strict=True):  # a token once in each: no race
            out.index_add_(0, tokens, part.to(out.dtype))
        return out.to(x.dtype)


class AllToAllBody(DealtBody):
    """See `engine.interfaces.experts.Experts`."""

    layer_class = AllToAllLayer
