"""Checkpoint driver `safetensors`: local folders in the Hugging Face layout. Torch comes when tensors are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.interfaces.checkpoint import CheckpointCard
from engine.types.errors import ModelNotFoundError
from engine.types.model import CheckpointFiles
from engine.types.pooling import PoolerConfig
from engine_kit.hf_folder import read_pooler, resolve_folder

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext


_OTHER_FORMATS = (".gguf", ".bin", ".pt", ".pth", ".onnx")


class SafetensorsCheckpoint(CheckpointCard):
    """Opens folders with config.json and *.safetensors files, whole or in shards. Reaches no hub."""

    body = "engine_reference.checkpoint_safetensors:SafetensorsReader"
    framework = "torch"

    @classmethod
    def claims(cls, name: str) -> bool:
        """Folders, and all that looks like a path or like a hub's "org/name".

        A bare name is a folder only if a model lies in it: other drivers have names of their own, which must not
        clash with any folder that happens to lie about. Nor is a folder of GGUF files alone one of this driver's.
        """
        if not name or "://" in name or name.lower().endswith(_OTHER_FORMATS):
            return False
        if _holds_gguf_alone(os.path.expanduser(name)):
            return False
        if "/" in name or name.startswith("~") or name in (".", ".."):
            return True
        return os.path.isfile(os.path.join(name, "config.json"))

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        """Find the files, as `CheckpointCard.resolve` says."""
        folder = Path(os.path.expanduser(name))
        if not os.path.exists(folder) and _is_hub_name(name):
            raise ModelNotFoundError(
                f"open model {name!r}",
                f"there is no such folder under {Path.cwd()}, and no model hub is reached by this driver",
                "download the model and pass its folder",
            )
        return resolve_folder(name, folder)

    @classmethod
    def pooler(cls, files: CheckpointFiles, default: PoolerConfig) -> PoolerConfig | None:
        """As the files of sentence-transformers say."""
        return read_pooler(Path(files.folder), default)


def _holds_gguf_alone(folder: str) -> bool:
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):
        return False
    gguf = any(name.lower().endswith(".gguf") for name in names)
    return gguf and not any(name.endswith(".safetensors") for name in names)


def _is_hub_name(name: str) -> bool:
    """True for "org/name", which no leading dot, slash or tilde marks as a path."""
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and parts[0] not in (".", "..") and not name.startswith("~")


class SafetensorsReader:
    """Streams the tensors of `start.files.weights`, as `engine.interfaces.checkpoint.Checkpoint` says."""

    def __init__(self, context: WorkerContext) -> None:
        self._files = context.start.files

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, host tensor in the file's dtype), and the head that the config asks to be made of tokens."""
        from engine_kit.label_tokens import with_label_rows  # with torch, which the card does without
        from engine_kit.safetensors_files import read_safetensors

        return with_label_rows(read_safetensors(self._files.weights), self._files)
