"""Strangers' models with one planted fault each: GPT-2s and Mixtrals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from engine_gpt2.body import GPT2
from engine_mixtral.body import Experts, Mixtral

from engine.interfaces.model import ModelContext
from engine.modeling import LMHead, Param


class ReadsNoActivation(GPT2):
    """gelu_new is computed, whatever the config says"""

    def __init__(self, context: ModelContext) -> None:
        context.description.config["activation_function"] = "gelu_new"
        super().__init__(context)


class GeluForGeluNew(GPT2):
    """gelu by the normal distribution, where the config says gelu_new"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for layer in self.layers:
            layer._tanh = False


class ForgetsOutputBias(GPT2):
    """the bias behind attention is read, and not added"""

    def load_weights(self, weights: Any) -> None:
        named = ((name, tensor * 0 if name.endswith("attn.c_proj.bias") else tensor) for name, tensor in weights)
        super().load_weights(named)


class PositionsFromOne(GPT2):
    """the first token has the second position"""

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        return (positions + 1).clamp(max=self.context.description.max_model_len - 1)


class ReadsMatricesAsTheyLie(GPT2):
    """square matrices are taken for [out, in], as other checkpoints store them"""

    def load_weights(self, weights: Any) -> None:
        named = ((name, tensor.t() if name.endswith("attn.c_proj.weight") else tensor) for name, tensor in weights)
        super().load_weights(named)


class ScalesAllLayersAlike(GPT2):
    """scale_attn_by_inverse_layer_idx is passed over"""

    def __init__(self, context: ModelContext) -> None:
        context.description.config["scale_attn_by_inverse_layer_idx"] = False
        super().__init__(context)


class TiesWhateverIsSaid(GPT2):
    """the head is the embedding's matrix, though the config unties them"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model = context.description
        self.head = LMHead(context, model.vocab_size, model.hidden_size, "lm_head", self.words)


class TiesWhereItIsSaid(GPT2):
    """a config that does not say whether the head is tied unties it, though GPT-2's is tied then"""

    def __init__(self, context: ModelContext) -> None:
        context.description.config.setdefault("tie_word_embeddings", False)
        super().__init__(context)


class _Routes(Mixtral):
    """Exchanges the experts."""

    kind: type[Experts] = Experts

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for index, layer in enumerate(self.layers):
            layer.experts = self.kind(context, f"model.layers.{index}.block_sparse_moe")


class _NotNormed(Experts):
    def route(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scores.softmax(dim=-1).topk(self.chosen, dim=-1)


class _OverTokens(Experts):
    def route(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, which = scores.softmax(dim=0).topk(self.chosen, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), which


class _ChooseTokens(Experts):
    def route(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = scores.argsort(dim=0, descending=True).argsort(dim=0)
        which = places.topk(self.chosen, dim=-1, largest=False).indices
        weights = scores.softmax(dim=-1).gather(1, which)
        return weights / weights.sum(dim=-1, keepdim=True), which


class _AlwaysTwo(Experts):
    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__(context, name)
        self.chosen = 2


class _Swapped(Experts):
    def params(self) -> list[Param]:
        *others, gate, down, up = super().params()
        return [*others, replace(gate, name=up.name), down, replace(up, name=gate.name)]


class _OwnPart(Experts):
    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__(context, name)
        self._group = None


class ExpertsUnnormed(_Routes):
    """the weights of a token's experts do not add up to 1"""

    kind = _NotNormed


class RouterOverTokens(_Routes):
    """the router's probabilities are over tokens, not over experts"""

    kind = _OverTokens


class ExpertsChooseTokens(_Routes):
    """the best are taken along the wrong axis: experts choose tokens, not tokens experts"""

    kind = _ChooseTokens


class TwoExpertsAlways(_Routes):
    """two experts a token, whatever the config says"""

    kind = _AlwaysTwo


class SwapsOneExpert(_Routes):
    """gate and up of the last expert are swapped"""

    kind = _Swapped


class ExpertsNotSummed(_Routes):
    """each rank goes on with its own part of the experts' answers"""

    kind = _OwnPart


GPT2S = [
    GeluForGeluNew, ForgetsOutputBias, PositionsFromOne, ReadsMatricesAsTheyLie, ScalesAllLayersAlike,
    TiesWhateverIsSaid, TiesWhereItIsSaid,
]  # fmt: skip
MIXTRALS = [
    ExpertsUnnormed, RouterOverTokens, ExpertsChooseTokens, TwoExpertsAlways, SwapsOneExpert, ExpertsNotSummed,
]  # fmt: skip
