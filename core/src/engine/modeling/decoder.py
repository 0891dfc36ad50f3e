"""What the bodies of models are built on: their weights, and the frame of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.interfaces.ops import Ops
from engine.modeling.layers import Embedding, LMHead, Norm
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
        return sum(part.num_elements() for part in self.parts())

    def weight_bytes(self) -> int:
        """Memory of the weights on this rank: quantised ones as they are packed, others as they were before that."""
        return sum(part.own_bytes(self.context.dtype.itemsize) for part in self.parts())


class Stack(Module):
    """A model's layers, as many of them as this worker's stage has.

    Args:
        context: the model's.
        count: layers of the whole model.
        make: builds the layer of this index, with the context that it is given. Those of other stages are built once
            without attention, for the names of their weights, which the checkpoint holds and this worker passes over.
    """

    def __init__(self, context: ModelContext, count: int, make: Callable[[ModelContext, int], Module]) -> None:
        mine = context.stage.layers(count)
        self.layers: list[Any] = [make(context, index) for index in mine]
        elsewhere = replace(context, attention=_nothing, latent_attention=_nothing, state=_nothing, adapters=None)
        others = [make(elsewhere, index) for index in range(count) if index not in mine]
        self._absent = frozenset[str]().union(*(_names(layer) for layer in others))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def tolerated(self) -> frozenset[str]:
        """The weights of the other stages' layers."""
        return self._absent


class Decoder(ModelBody):
    """Base of decoder models: set `embed`, `layers`, `norm` and `head` in `__init__`, and that is the model.

    A layer is called with the state and changes it in place: it reads `hidden` and `residual` (absent before the
    first layer), and leaves both. The last one may leave the rows alone that are `wanted`, see `narrowed`.

    A model that does not generate sets no `head`; one that classifies sets `score`. On one of several stages, what
    others have is dropped before the weights are loaded: all but the first stage have no `embed` (but for the matrix
    of a tied head), and all but the last no `norm`, `head` and `score`.
    """

    embed: Embedding
    layers: Stack
    norm: Norm
    head: LMHead
    score: Callable[[torch.Tensor], torch.Tensor]
    _absent: frozenset[str] = frozenset()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `ModelBody.load_weights`, of this stage's parts."""
        whole, stage = _names(self), self.context.stage
        absent: tuple[str, ...] = () if stage.first or "embed" in self.context.lends else ("embed",)
        absent += () if stage.last else ("norm", "head", "score")
        for part in absent:
            vars(self).pop(part, None)
        self._absent = whole - _names(self)
        super().load_weights(weights)

    def tolerated(self) -> frozenset[str]:
        """The weights of the other stages' parts."""
        return self._absent

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor | None:
        """The final, normed hidden states [T, hidden_size]; None but on the last stage. A state that brings `hidden`
        is not embedded again."""
        if "hidden" not in state:
            state["hidden"] = self.embed(state["token_ids"])
        wanted = state.pop("wanted", None)
        for layer in walk(self.layers, state):
            if wanted is not None and layer is self.layers.layers[-1]:
                state["wanted"], wanted = wanted, None
            layer(state)
        if wanted is not None:  # the walk left the last layer out
            state["wanted"] = wanted
        return self.norm.add(state["hidden"], state.get("residual"))[0] if self.context.stage.last else None

    def embed_vectors(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The vectors [n, hidden_size] themselves."""
        return vectors

    def state_sizes(self) -> Mapping[str, int]:
        """`hidden` and `residual`, as every layer leaves them."""
        return dict.fromkeys(("hidden", "residual"), self.context.description.hidden_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        return self.head(hidden)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, num_labels]."""
        return self.score(hidden)


def narrowed(ops: Ops, state: State, *streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows that are read behind the model, of what the last layer has behind its attention: of streams [T, ...]
    those that the state calls `wanted`, [n, ...], and the name is taken from it. All of them in other layers."""
    wanted = state.pop("wanted", None)
    return streams if wanted is None else tuple(ops.gather_rows(stream, wanted) for stream in streams)


def _names(module: Module) -> frozenset[str]:
    """The checkpoint's names of everything in a module."""
    parts = list(module.parts())
    return frozenset(param.name for part in parts for param in part.params()).union(*(p.tolerated() for p in parts))


def _nothing(*args: Any, **named: Any) -> Any:
    """Of a layer that is built for its names alone."""
