"""The card of checkpoint driver `gguf`."""

from __future__ import annotations

import os

from engine.interfaces.checkpoint import CheckpointCard
from engine.types.model import CheckpointFiles
from engine_gguf.architectures import config_of, generation_of
from engine_gguf.parts import SUFFIX, files_of, find, in_folder, read_model


class GGUFCheckpoint(CheckpointCard):
    """Opens GGUF files, whole or in parts, and folders with one model in them. All is read from the file: the config,
    the tokenizer, the chat template."""

    body = "engine_gguf.weights:GGUFWeights"
    framework = "torch"

    @classmethod
    def claims(cls, name: str) -> bool:
        """Names that end so, and folders that hold such files and no model of another form."""
        if not name or "://" in name or "\x00" in name:
            return False
        if name.lower().endswith(SUFFIX):
            return True
        path = os.path.expanduser(name)
        if not os.path.isdir(path) or not in_folder(path):
            return False
        return not any(other.endswith(".safetensors") for other in os.listdir(path))

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        """Find the parts and read the metadata, as `CheckpointCard.resolve` says; the tokenizer's files are the file.

        Raises UnsupportedModelError for an architecture that is not served.
        """
        files = files_of(find(name))
        model = read_model(files)
        return CheckpointFiles(
            name=name,
            folder=str(files[0]),
            weights=tuple(str(file) for file in files),
            config=config_of(model),
            generation_config=generation_of(model),
        )
