"""Medusa heads (Cai et al. 2024): each is for the token so many places ahead, from the target's last state alone."""

import torch
import torch.nn.functional as F
from torch import nn

from engine_drafters.train.target import Batch, Target

HEAD_WEIGHT = 0.8


class TrainedResBlock(nn.Module):
    """x + SiLU(linear(x)); zeros at first, so that a head begins as the target's own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """`heads` stacks of `layers` blocks: `{head}.{layer}.linear.weight`, as in FasterDecoding's layout.

    A head's own linear to the vocabulary is left out: all share the target's head (`original_lm_head`).
    """

    def __init__(self, hidden: int, heads: int, layers: int) -> None:
        super().__init__(nn.Sequential(*(TrainedResBlock(hidden) for _ in range(layers))) for _ in range(heads))


class MedusaTraining:
    """Trains `MedusaHeads` to say what the target says."""

    def __init__(self, target: Target, heads: MedusaHeads) -> None:
        self.module = heads
        self._target = target

    def _states(self, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The states of each head's drafts [n, H], and the target's [B, T, H]."""
        hidden = self._target.states(batch.tokens)[1]
        roots = batch.behind(hidden)
        return [head(roots[batch.drafted > step]) for step, head in enumerate(self.module)], hidden

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross entropy against the target's distribution."""
        made, hidden = self._states(batch)
        says = self._target.says(batch, hidden)
        total = torch.zeros(())
        for step, states in enumerate(made):
            wanted = says[torch.arange(len(says))[batch.drafted > step] + step]
            total = total + HEAD_WEIGHT**step * F.cross_entropy(states @ self._target.head.T, wanted)
        return total

    def logits(self, batch: Batch) -> list[torch.Tensor]:
        """Of each head where there is a draft: [n, V] each."""
        return [states @ self._target.head.T for states in self._states(batch)[0]]

    def tokens(self, batch: Batch) -> list[torch.Tensor]:
        """The likeliest draft of each head where there is one: [n] each."""
        return [logits.argmax(-1) for logits in self.logits(batch)]
