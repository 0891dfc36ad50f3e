"""What quantization drivers that round plain weights begin with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.interfaces.quantization import LayerShape
from engine.types.errors import ConfigError


def plain_layer(layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight [O, I], bias [O] or None) of `plain_tensors`.

    Raises ConfigError where they are no weight and bias of numbers.
    """
    weight, bias = tensors["weight"], tensors.get("bias")
    if weight.ndim == 2 and weight.is_floating_point() and (bias is None or bias.shape == weight.shape[:1]):
        return weight, bias
    shapes = [tuple(weight.shape), *([] if bias is None else [tuple(bias.shape)])]
    raise ConfigError(
        f"quantise a layer of kind '{layer.kind}'",
        f"its tensors are {weight.dtype} {' and '.join(map(str, shapes))}, not a weight [O, I] and a bias [O]",
        "leave --quantization out for this kind of layer, or mend the checkpoint",
    )
