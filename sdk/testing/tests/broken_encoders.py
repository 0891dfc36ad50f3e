"""Encoders with one planted fault each: BERTs that classify. See mutants_model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from engine.interfaces.model import ModelContext, State
from engine_reference.models.bert import BertForClassification


class _Bert(BertForClassification):
    """Exchanges what comes in."""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        self.change(state)
        return super().forward(state, walk)

    def change(self, state: State) -> None:
        pass


class IgnoresTypes(_Bert):
    """token types are ignored"""

    def change(self, state: State) -> None:
        state["token_type_ids"] = torch.zeros_like(state["token_type_ids"])


class TypesShifted(_Bert):
    """each token has the type of the one before it"""

    def change(self, state: State) -> None:
        state["token_type_ids"] = state["token_type_ids"].roll(1)


class PositionsOfTheStep(_Bert):
    """positions are counted over the whole step"""

    def change(self, state: State) -> None:
        state["positions"] = torch.arange(len(state["positions"])) % 64


class LastPositionTwice(_Bert):
    """the last position has the vector of the one before it"""

    def change(self, state: State) -> None:
        state["positions"] = state["positions"].clamp(max=self.context.description.max_model_len - 2)


class NoActivation(_Bert):
    """the classification head has no tanh"""

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pooler(hidden))


class GeluByTanh(_Bert):
    """gelu is approximated, though the config names the exact one"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for layer in self.layers:
            layer._tanh = True


class NormsBefore(_Bert):
    """the last layer's hidden states are normed once more"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        hidden = super().forward(state, walk)
        return self.layers[-1].norm(hidden)


class SeesTheStep(_Bert):
    """rows of one step see each other"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        hidden = super().forward(state, walk)
        return hidden + 0.1 * hidden.mean(0, keepdim=True)


class SeesItself(BertForClassification):
    """attention gives the value of the token itself: no other is seen"""

    def __init__(self, context: ModelContext) -> None:
        def attention(layer: int, scale: float, **more: Any) -> Any:
            attend = context.attention(layer, scale, **more)
            return lambda q, k, v: attend(q, k, v) * 0 + v.flatten(1)

        super().__init__(dataclasses.replace(context, attention=attention))


class HeadOnOneRank(_Bert):
    """ranks but the first forget what the others computed of the feed-forward block"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        if context.tp_size > 1:
            self.layers[-1].down._group = None


ENCODERS = [
    IgnoresTypes, TypesShifted, PositionsOfTheStep, LastPositionTwice, NoActivation, GeluByTanh, NormsBefore,
    SeesTheStep, SeesItself, HeadOnOneRank,
]  # fmt: skip
