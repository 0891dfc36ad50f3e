"""The card of checkpoint driver `tiny`: the model that lies in this package."""

from engine.interfaces.checkpoint import CheckpointCard
from engine.types.model import CheckpointFiles
from engine_kit.hf_folder import resolve_folder
from engine_tiny import model_folder


class TinyCheckpoint(CheckpointCard):
    """Opens the bundled model by its name, and is what is opened when no model is named."""

    body = "engine_tiny.reader:TinyReader"
    framework = "torch"
    default_model = "tiny"

    @classmethod
    def claims(cls, name: str) -> bool:
        """Its one name, and no path: a folder called `tiny` is opened as `./tiny`."""
        return name == "tiny"

    @classmethod
    def resolve(cls, name: str) -> CheckpointFiles:
        """The files in the package, as `CheckpointCard.resolve` says."""
        return resolve_folder(name, model_folder())
