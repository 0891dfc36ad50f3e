"""The vocabulary: ids to vectors at the bottom, vectors to logits at the top, with one matrix or two."""

from __future__ import annotations

from typing import Any

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.linear import Linear
from engine.modeling.module import Module, Slot
from engine.modeling.parallel import partition


class Embedding(Module):
    """token ids [T] -> [T, hidden_size].

    Args:
        name: the checkpoint's, e.g. "model.embed_tokens".
    """

    def __init__(self, context: ModelContext, vocab_size: int, hidden_size: int, name: str) -> None:
        self._ops, self.name = context.ops, name
        self._dtype, self._device = context.dtype, context.device
        self.shape = (partition(vocab_size, context, name), hidden_size)
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[vocab_size, hidden_size], once it is loaded."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._weight

    def slots(self) -> list[Slot]:
        """`<name>.weight`."""
        return [Slot(f"{self.name}.weight", self.shape, self)]

    def place(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Copy the matrix, cast to the model's dtype."""
        self._weight = torch.empty(self.shape, dtype=self._dtype, device=self._device)
        self._weight.copy_(tensor)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int [T] -> [T, hidden_size]."""
        return self._ops.embedding(ids, self.weight)


class LMHead(Module):
    """hidden [R, hidden_size] -> logits [R, vocab_size].

    Args:
        name: the checkpoint's, e.g. "lm_head".
        tied: the embedding whose matrix it shares; None where it has its own. A tied model's file may hold a copy
            under `name`, which is passed over.
    """

    def __init__(
        self,
        context: ModelContext,
        vocab_size: int,
        hidden_size: int,
        name: str,
        tied: Embedding | None = None,
        bias: bool = False,
    ) -> None:
        self._ops, self.name, self._tied = context.ops, name, tied
        self._own = None if tied else Linear(context, hidden_size, [partition(vocab_size, context, name)], [name], bias)
        self._packed: Any = None

    def tolerated(self) -> frozenset[str]:
        """The copy in a tied model's file."""
        return frozenset() if self._tied is None else frozenset({f"{self.name}.weight"})

    def finish(self) -> None:
        """Pack the shared matrix, which the embedding keeps."""
        if self._tied is not None:
            self._packed = self._ops.pack_linear(self._tied.weight, None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        return self._own(hidden) if self._own is not None else self._ops.linear(hidden, self._packed)
