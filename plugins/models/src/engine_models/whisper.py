"""Whisper (Radford et al. 2022): BART's blocks with the norms before them, behind two convolutions over features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Module, Param
from engine_kit.model_config import integer
from engine_models.bart import BartModel
from engine_models.whisper_card import STRIDE, Whisper

_WIDTH = 3


class Convolution(Module):
    """gelu(convolution over time), of three frames each; every rank has all of it.

    Args:
        name: the checkpoint's, e.g. "model.encoder.conv1".
        stride: frames from one to the next.
    """

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, stride: int) -> None:
        self._ops = context.ops
        self._shapes = {f"{name}.weight": (out_size, in_size, _WIDTH), f"{name}.bias": (out_size,)}
        self._stride = stride
        self._dtype = context.dtype
        self._device = context.device
        self._tensors: dict[str, torch.Tensor] = {}

    def params(self) -> list[Param]:
        """Weight [out_size, in_size, 3] and bias [out_size]."""
        return [Param(name, shape, self, name.rpartition(".")[2]) for name, shape in self._shapes.items()]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy one of them, cast to the model's dtype."""
        self._tensors[param.key] = tensor.to(self._device, self._dtype, copy=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_size] -> [T / stride, out_size]."""
        weight, bias = self._tensors["weight"], self._tensors["bias"]
        found = torch.nn.functional.conv1d(x.T[None], weight, bias, stride=self._stride, padding=1)
        return self._ops.gelu(found[0].T.contiguous(), False)


class WhisperModel(BartModel):
    """WhisperForConditionalGeneration."""

    behind = False
    first = 0
    normed = False
    card = Whisper
    shared = "model.decoder.embed_tokens"
    output = "proj_out"

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        size, bins = (
            context.description.hidden_size,
            integer(self.card.filled(context.description.config), "num_mel_bins"),
        )
        self.conv1 = Convolution(context, bins, size, "model.encoder.conv1", 1)
        self._made_up = 0
        self.conv2 = Convolution(context, size, size, "model.encoder.conv2", STRIDE)

    def embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: float32 [n, num_mel_bins] -> [n / 2, hidden_size]."""
        hidden = self.conv2(self.conv1(inputs.to(self.context.dtype)))
        places = torch.arange(len(hidden), device=hidden.device)
        return self.context.ops.add(hidden, self.encoder_positions(places))

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Projections of keys have no bias: zeros stand in its place, beside those of queries and values."""
        self._made_up = 0
        for name, tensor in super()._named(weights):
            yield name, tensor
            if name.endswith("k_proj.weight"):
                self._made_up += len(tensor) // self.context.tp_size
                yield name.replace("weight", "bias"), torch.zeros(len(tensor))

    def num_parameters(self) -> int:
        """Without the zeros that were made up."""
        return super().num_parameters() - self._made_up

    def weight_bytes(self) -> int:
        """Likewise, where layers are plain."""
        return super().weight_bytes() - self._made_up * self.context.dtype.itemsize * (not self.context.quantization)
