"""What the bodies of all models have in common: their weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.module import Module
from engine.modeling.weights import load_weights


class Body(Module):
    """Base of models: loads and counts the weights of its parts."""

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Place and pack the checkpoint's tensors. Raises CheckpointError, see `engine.modeling.weights`."""
        load_weights(self, weights, asked=f"load the weights of {self.context.description.architecture}")

    def num_parameters(self) -> int:
        """Elements of the weights on this rank; tied ones counted once."""
        return sum(math.prod(slot.local_shape) for part in self.parts() for slot in part.slots())

    def weight_bytes(self) -> int:
        """Memory of the weights on this rank: quantised ones as they are packed, others as they were before that."""
        return sum(part.own_bytes(self.context.dtype.itemsize) for part in self.parts())
