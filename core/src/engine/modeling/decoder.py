"""The frame of a decoder: embedding, a stack of layers under the runner's walk, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.interfaces.model import State, Walk
from engine.modeling.body import Body
from engine.modeling.embedding import Embedding, LMHead
from engine.modeling.linear import Linear
from engine.modeling.norm import RMSNorm


class Decoder(Body):
    """Base of decoder models: set `embed`, `layers`, `norm` and `head` in `__init__`, and that is the model.

    A layer is called with the state and changes it in place: it reads `hidden` and `residual` (absent before the
    first layer), and leaves both.

    A model that does not generate sets no `head`; one that classifies sets `score`.
    """

    embed: Embedding
    layers: Sequence[Callable[[State], None]]
    norm: RMSNorm
    head: LMHead
    score: Linear

    def forward(self, state: State, walk: Walk) -> torch.Tensor:
        """The final, normed hidden states [T, hidden_size]. A state that brings `hidden` is not embedded again."""
        if "hidden" not in state:
            state["hidden"] = self.embed(state["token_ids"])
        for layer in walk(self.layers, state):
            layer(state)
        hidden, _ = self.norm.add(state["hidden"], state.get("residual"))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        return self.head(hidden)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, num_labels]."""
        return self.score(hidden)
