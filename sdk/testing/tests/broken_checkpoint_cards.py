"""Checkpoint cards with one planted fault each, beside the bundled model's."""

from __future__ import annotations

import msgspec

from engine.interfaces.checkpoint import CheckpointCard
from engine.types.errors import ModelNotFoundError
from engine.types.model import CheckpointFiles
from engine.types.pooling import PoolerConfig
from engine_tiny.card import TinyCheckpoint


class Sound(TinyCheckpoint):
    """Opens the bundled model, and says where there is none."""

    @classmethod
    def claims(cls, name: str) -> bool:
        return name == "tiny" or (name.startswith("/") and len(name) < 1000)

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        if name != "tiny":
            raise ModelNotFoundError(f"open model {name!r}", "there is no such folder")
        return super().resolve(name)


class ClaimsAll(Sound):
    """the card claims every name"""

    @classmethod
    def claims(cls, name: str) -> bool:
        return True


class ClaimsOnce(Sound):
    """the card claims a name the first time alone"""

    asked = 0

    @classmethod
    def claims(cls, name: str) -> bool:
        cls.asked += 1
        return cls.asked % 2 == 1


class FindsAnything(Sound):
    """a model that is not there is found all the same"""

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        return super().resolve("tiny")


class OtherName(Sound):
    """the files are of another name than was asked for"""

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        return msgspec.structs.replace(super().resolve(name), name="model")


class NoArchitecture(Sound):
    """the config names no architecture"""

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        return msgspec.structs.replace(super().resolve(name), config={})


class AbsentFiles(Sound):
    """files that are not there are among the weights"""

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        files = super().resolve(name)
        return msgspec.structs.replace(files, weights=(*files.weights, files.folder + "/more.safetensors"))


class PoolsByItself(Sound):
    """how to pool is said without regard for the model's head"""

    @classmethod
    def pooler(cls, files: CheckpointFiles, default: PoolerConfig) -> PoolerConfig:
        return PoolerConfig()


CARDS: tuple[type[CheckpointCard], ...] = (
    ClaimsAll, ClaimsOnce, FindsAnything, OtherName, NoArchitecture, AbsentFiles, PoolsByItself,
)  # fmt: skip
