"""The body of checkpoint driver `tiny`: an ordinary safetensors file, read as the core reads all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine_kit.safetensors_files import read_safetensors

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext


class TinyReader:
    """Streams the tensors of `start.files.weights`, as `engine.interfaces.checkpoint.Checkpoint` says."""

    def __init__(self, context: WorkerContext) -> None:
        self._files = context.start.files.weights

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, host tensor in the file's dtype)."""
        return read_safetensors(self._files)
