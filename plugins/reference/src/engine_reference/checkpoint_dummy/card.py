"""The card of checkpoint driver `dummy`."""

from __future__ import annotations

from pathlib import Path

from engine.interfaces.checkpoint import CheckpointCard
from engine.types.model import CheckpointFiles
from engine_reference.checkpoint_dummy.sizes import PREFIX, config_of


class DummyCheckpoint(CheckpointCard):
    """Makes models up: "dummy:0.6B", "dummy:8B,layers=4". Random weights, real dimensions, a tokenizer of bytes."""

    body = "engine_reference.checkpoint_dummy.weights:DummyWeights"
    framework = "torch"

    @classmethod
    def claims(cls, name: str) -> bool:
        """Everything that begins with "dummy:"."""
        return name.startswith(PREFIX)

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        """Make the config up; there are no files of weights. Raises ModelNotFoundError as `config_of`."""
        folder = Path(__file__).with_name("files")
        return CheckpointFiles(name=name, folder=str(folder), weights=(), config=config_of(name))
