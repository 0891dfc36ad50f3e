"""Checkpoint driver `draft_head`: published heads (`engine_drafters.layouts`). Torch comes when tensors are read.

A folder is opened by the name "draft-head://" and its path: by path alone it may as well be a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.interfaces.checkpoint import CheckpointCard
from engine.types.errors import CheckpointError
from engine.types.model import CheckpointFiles
from engine_drafters.layouts import read_head, renamed

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext

SCHEME = "draft-head://"


class DraftHeadCheckpoint(CheckpointCard):
    """Opens folders of EAGLE, EAGLE-3 and Medusa heads, in safetensors or pickled."""

    body = "engine_drafters.checkpoint:DraftHeadReader"
    framework = "torch"

    @classmethod
    def claims(cls, name: str) -> bool:
        """What begins with "draft-head://"."""
        return name.startswith(SCHEME)

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        """See `engine_drafters.layouts.read_head`, and its errors."""
        head = read_head(name.removeprefix(SCHEME))
        return CheckpointFiles(
            name=name, folder=str(head.folder), weights=tuple(str(path) for path in head.weights), config=head.config
        )


class DraftHeadReader:
    """Streams the tensors, by the names that the models of this package have for them."""

    def __init__(self, context: WorkerContext) -> None:
        self._files = context.start.files

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `engine.interfaces.checkpoint.Checkpoint`. Of a pickle nothing but tensors is loaded."""
        from engine_kit.safetensors_files import read_safetensors

        architecture = self._files.config["architectures"][0]
        for file in self._files.weights:
            stored = read_safetensors([file]) if file.endswith(".safetensors") else _unpickled(file)
            for name, tensor in stored:
                yield renamed(architecture, name), tensor


def _unpickled(file: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    try:
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the unpickler's own error among them, which has no public name in torch
        raise CheckpointError(
            f"read tensors from {file}",
            f"torch.load(weights_only=True) says: {str(error).strip().splitlines()[0][:200]}",
            "fetch the file again, or convert it to safetensors",
        ) from error
    if not isinstance(stored, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in stored.values()):
        raise CheckpointError(f"read tensors from {file}", "it holds no named tensors", "convert it to safetensors")
    yield from stored.items()
