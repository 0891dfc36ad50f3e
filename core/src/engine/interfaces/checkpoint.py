"""Point `checkpoint`: from a model's name to its files and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from engine.plugin import Card
from engine.types.model import CheckpointFiles

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext
    from engine.types.pooling import PoolerConfig


class CheckpointCard(Card):
    """Describes a kind of checkpoint. The one card whose `claims(name)` is true is used; two is an error."""

    default_model: str | None = None
    """A name to use when the user gives none; at most one installed card declares one."""

    @classmethod
    def claims(cls, name: str) -> bool:
        """True where this driver would open `name` (a path or a name). Cheap: looks at names, opens no tensor."""
        raise NotImplementedError

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        """Find the files. Raises ModelNotFoundError, or CheckpointError for a file that is missing or no JSON."""
        raise NotImplementedError

    @classmethod
    def pooler(cls, files: CheckpointFiles, default: PoolerConfig) -> PoolerConfig | None:
        """How embeddings are made of hidden states, where files beside the checkpoint say so (sentence-transformers);
        None: they do not. `default`: the architecture's, for what the files leave open.

        Raises CheckpointError for a broken file, UnsupportedModelError for what this engine does not have.
        """
        return None


class Checkpoint(Protocol):
    """A checkpoint being read, in a worker. Built with a `WorkerContext`, whose `start.files` it reads."""

    def __init__(self, context: WorkerContext) -> None: ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, tensor in the file's dtype), holding one file's mapping at a time. Tensors lie on the host, or
        on the context's device where they were made there.

        Raises CheckpointError for a truncated or broken file, naming it.
        """
