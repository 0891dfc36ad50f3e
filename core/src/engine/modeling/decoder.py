"""The frame of a decoder: embedding, a stack of layers under the runner's walk, norm, head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.interfaces.model import ModelContext, State, Walk
from engine.modeling.embedding import Embedding, LMHead
from engine.modeling.module import Module
from engine.modeling.norm import RMSNorm
from engine.modeling.weights import load_weights


class Decoder(Module):
    """Base of decoder models: set `embed`, `layers`, `norm` and `head` in `__init__`, and that is the model.

    A layer is called with the state and changes it in place: it reads `hidden` and `residual` (absent before the
    first layer), and leaves both.
    """

    embed: Embedding
    layers: Sequence[Callable[[State], None]]
    norm: RMSNorm
    head: LMHead

    def __init__(self, context: ModelContext) -> None:
        self.context = context

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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Place and pack the checkpoint's tensors. Raises CheckpointError, see `engine.modeling.weights`."""
        load_weights(self, weights, asked=f"load the weights of {self.context.description.architecture}")

    def num_parameters(self) -> int:
        """Elements of the weights on this rank; tied ones counted once."""
        return sum(math.prod(slot.local_shape) for part in self.parts() for slot in part.slots())

    def weight_bytes(self) -> int:
        """Memory of the weights on this rank, as they are before a driver packs them."""
        return self.num_parameters() * self.context.dtype.itemsize
