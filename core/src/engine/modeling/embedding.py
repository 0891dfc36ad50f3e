"""The vocabulary: ids to vectors at the bottom, vectors to logits at the top, with one matrix or two.

Over several ranks each holds some rows of the vocabulary: an id's vector comes from the one that has it (the others
give zeros, and the sum goes round), and logits are gathered on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.linear import Linear
from engine.modeling.module import Module, Slot
from engine.modeling.parallel import group_of, vocabulary


class Embedding(Module):
    """token ids [T] -> [T, hidden_size].

    Args:
        name: the checkpoint's, e.g. "model.embed_tokens".

    Attributes:
        shape: of the rows on this rank.
    """

    def __init__(self, context: ModelContext, vocab_size: int, hidden_size: int, name: str) -> None:
        self._ops, self.name, self._group = context.ops, name, group_of(context)
        self._dtype, self._device = context.dtype, context.device
        self._rows = vocabulary(vocab_size, context.size)[context.rank]
        self.shape = (self._rows.length, hidden_size)
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows [vocab_size / ranks, hidden_size], once they are loaded."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._weight

    def slots(self) -> list[Slot]:
        """`<name>.weight`."""
        shape = (self._rows.total, self.shape[1])
        return [Slot(f"{self.name}.weight", shape, self, part=(self._rows.part,))]

    def place(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Copy the matrix, cast to the model's dtype."""
        self._weight = torch.empty(self.shape, dtype=self._dtype, device=self._device)
        self._weight.copy_(tensor)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int [T] -> [T, hidden_size]."""
        if self._group is None:
            return self._ops.embedding(ids, self.weight)
        return self._group.all_reduce(self._ops.embedding_part(ids, self.weight, self._rows.start))


class LMHead(Module):
    """hidden [R, hidden_size] -> logits [R, vocab_size], on every rank.

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
        self._ops, self.name, self._tied, self._group = context.ops, name, tied, group_of(context)
        shards = vocabulary(vocab_size, context.size)
        self._sizes = tuple(shard.length for shard in shards)
        self._own = None if tied else Linear(context, hidden_size, [shards[context.rank]], [name], bias, kind="head")
        self._quantization = context.quantization.get("head")
        self._linear = context.ops.linear if self._quantization is None else self._quantization.linear
        self._packed: Any = None

    def tolerated(self) -> frozenset[str]:
        """The copy in a tied model's file."""
        return frozenset() if self._tied is None else frozenset({f"{self.name}.weight"})

    def finish(self) -> None:
        """Pack the shared matrix, which the embedding keeps as it is."""
        if self._tied is None:
            return
        if self._quantization is None:
            self._packed = self._ops.pack_linear(self._tied.weight, None)
        else:
            self._packed = self._quantization.pack("head", self._tied.weight, None)

    def own_bytes(self, itemsize: int) -> int:
        """Of the copy of a shared matrix that is quantised."""
        if self._quantization is None or self._packed is None:
            return super().own_bytes(itemsize)
        return self._quantization.packed_bytes(self._packed)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        logits = self._own(hidden) if self._own is not None else self._linear(hidden, self._packed)
        return logits if self._group is None else self._group.all_gather(logits, 1, self._sizes)
