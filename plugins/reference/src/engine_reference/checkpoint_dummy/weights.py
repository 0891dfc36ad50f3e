"""The body of checkpoint driver `dummy`."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import torch

from engine.interfaces.context import WorkerContext
from engine_reference.checkpoint_dummy.sizes import shapes_of


class DummyWeights:
    """Draws weights as they are asked for; see `engine.interfaces.checkpoint.Checkpoint`.

    Matrices are normal with a variance of 1 / inputs, embeddings with one of 0.02 squared, norms are ones: hidden
    states neither vanish nor overflow. Each tensor's seed is its name's checksum, so equal names make equal models, on
    devices of one kind: a GPU draws for itself, in a hundredth of the time, and has other random numbers than a
    processor.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._config = context.start.files.config
        self._device = context.device or torch.device("cpu")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, tensor in bfloat16, on the device that it is for)."""
        for name, shape in shapes_of(self._config).items():
            if len(shape) == 1:
                yield name, torch.ones(shape, dtype=torch.bfloat16, device=self._device)
                continue
            scale = 0.02 if name.startswith("model.embed") else shape[1] ** -0.5
            random = torch.Generator(self._device).manual_seed(crc32(name.encode()))
            weight = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            yield name, weight.normal_(0.0, scale, generator=random)
