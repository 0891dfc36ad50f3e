"""Medusa's heads: from the target's final hidden state at a position, one for each token that comes after the next.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024.
"""

from __future__ import annotations

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import Linear, LMHead, ModelBody, Module
from engine_drafters.layouts import TENSORS
from engine_drafters.models.eagle import target_of
from engine_kit.model_config import integer


class ResBlock(Module):
    """x + silu(linear(x))."""

    def __init__(self, context: ModelContext, size: int, name: str) -> None:
        self.linear = Linear(context, size, [size], [f"{name}.linear"], bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, size] -> [R, size]."""
        return x + torch.nn.functional.silu(self.linear(x))


class MedusaHead(Module):
    """Blocks, and a matrix to the vocabulary: the target's, where the file has none."""

    def __init__(self, context: ModelContext, num_blocks: int, name: str) -> None:
        model = context.description
        matrix = f"{name}.{num_blocks}"
        self.blocks = [ResBlock(context, model.hidden_size, f"{name}.{index}") for index in range(num_blocks)]
        self.head: LMHead | None = None
        if f"{matrix}.weight" in model.config.get(TENSORS, ()):
            self.head = LMHead(context, model.vocab_size, model.hidden_size, matrix)
        self._context = context

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> logits [R, vocab_size]."""
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) if self.head is not None else target_of(self._context).logits(hidden)


class MedusaModel(ModelBody):
    """MedusaModel: no layers; `heads[i]` gives logits of the token i + 2 places after the position of the state."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        config = context.description.config
        num_blocks = integer(config, "medusa_num_layers", 1, low=0)
        self.heads = [
            MedusaHead(context, num_blocks, str(index)) for index in range(integer(config, "medusa_num_heads"))
        ]

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """The features [T, hidden_size], as they are."""
        return state["features"]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the first head: hidden [R, hidden_size] -> [R, vocab_size]."""
        return self.heads[0](hidden)
