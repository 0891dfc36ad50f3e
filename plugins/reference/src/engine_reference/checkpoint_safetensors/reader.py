"""The body of checkpoint driver `safetensors`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.interfaces.context import WorkerContext
from engine.modeling.loading import read_safetensors


class SafetensorsReader:
    """Streams the tensors of `start.files.weights`, as `engine.interfaces.checkpoint.Checkpoint` says."""

    def __init__(self, context: WorkerContext) -> None:
        self._files = context.start.files.weights

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, host tensor in the file's dtype)."""
        return read_safetensors(self._files)
