"""What the bodies of models are built on: their weights, and the frame of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling.layers import Embedding, LMHead, RMSNorm
from engine.modeling.linear import Linear
from engine.modeling.loading import load_weights
from engine.modeling.module import Module


class ModelBody(Module):
    """Base of models: loads and counts the weights of its parts."""

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Place and pack the checkpoint's tensors. Raises CheckpointError, see `engine.modeling.loading`."""
        load_weights(self, weights, asked=f"load the weights of {self.context.description.architecture}")

    def num_parameters(self) -> int:
        """Elements of the weights on this rank; tied ones counted once."""
        return sum(math.prod(param.local_shape) for part in self.parts() for param in part.params())

    def weight_bytes(self) -> int:
        """Memory of the weights on this rank: quantised ones as they are packed, others as they were before that."""
        return sum(part.own_bytes(self.context.dtype.itemsize) for part in self.parts())


class Decoder(ModelBody):
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

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
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
