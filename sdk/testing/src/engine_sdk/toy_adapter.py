"""A toy adapter: of rank 1, on every linear layer but the head, with vectors drawn from the layer's name.

It is to be compared with weights into which it is merged (`merged`), in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from engine.interfaces.quantization import LayerShape

Active = Callable[[int], torch.Tensor]
"""Of so many tokens those that the adapter is for: bool [n]."""


def vectors(name: str, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """b [outputs] and a [inputs] of a layer, in float64: the same each time."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    b, a = (torch.randn(size, generator=generator, dtype=torch.float64) / 8 for size in (outputs, inputs))
    return b, a


class RankOne:
    """y + b (a x), each part of the layer by itself. Implements `engine.interfaces.model.AdapterLayer`.

    Args:
        shape: of the layer, and of this rank's part of it.
        active: None: the adapter is for all tokens.
    """

    def __init__(self, shape: LayerShape, active: Active | None = None) -> None:
        self._active = active
        self._parts = []
        start = 0
        for name, part in zip(shape.names, shape.outputs, strict=True):
            b, a = vectors(name, part.total, shape.inputs.total)
            b = b[part.part][list(shape.orders.get(name, range(part.length)))]
            self._parts.append((slice(start, start + part.length), b, a[shape.inputs.part]))
            start += part.length

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `engine.interfaces.model.AdapterLayer.add`."""
        for columns, b, a in self._parts:
            scale = x @ a
            if self._active is not None:
                scale = scale * self._active(len(x))
            y[:, columns] += scale[:, None] * b
        return y


class ToyAdapters:
    """Adapts all but the head. Implements `engine.interfaces.model.Adapters`.

    Args:
        active: see `RankOne`.

    Attributes:
        asked: the layers that asked, by their names in the checkpoint.
    """

    def __init__(self, active: Active | None = None) -> None:
        self.asked: list[str] = []
        self._active = active

    def layer(self, shape: LayerShape) -> RankOne | None:
        """See `engine.interfaces.model.Adapters.layer`."""
        if shape.kind == "embedding":
            return None
        self.asked += shape.names
        return None if shape.kind == "head" else RankOne(shape, self._active)


def merged(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, in float64, with the adapter's products added to the weights of projections."""
    found = {}
    for name, tensor in tensors:
        found[name] = tensor.double()
        if "_proj" in name and name.endswith(".weight"):
            b, a = vectors(name.removesuffix(".weight"), *tensor.shape)
            found[name] += b[:, None] * a
    return found
