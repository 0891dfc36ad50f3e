"""Encoder-decoder models with one planted fault each: BARTs. See mutants_model."""

from __future__ import annotations

import torch

from engine.interfaces.model import LayerIterator, State
from engine_models.bart import BartModel


class EncodesOnce(BartModel):
    """what the encoder read first is kept for all that follows"""

    kept: torch.Tensor | None = None

    def encoded(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = hidden
        return self.kept[torch.arange(len(hidden)) % len(self.kept)]


class DecoderIsDeaf(BartModel):
    """the decoder's layers leave out what they see of the encoder"""

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        for layer in self.layers:
            layer.blocks[1].work = torch.zeros_like
        return super().forward(state, walk)


class EncoderWithoutPlaces(BartModel):
    """the encoder's tokens all have the first position"""

    def embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._embedded("encoder", inputs, torch.zeros_like(inputs, dtype=torch.int64))


ENCODER_DECODERS = [EncodesOnce, DecoderIsDeaf, EncoderWithoutPlaces]
