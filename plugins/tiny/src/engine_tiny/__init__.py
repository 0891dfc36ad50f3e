"""The bundled model: a small real Llama-architecture instruct model that ships in a package.

`model_folder()` is all that a reader of checkpoints needs. Training and evaluation live in modules of
their own, so that serving the model imports neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["model_folder"]


def model_folder() -> Path:
    """The folder in this package that holds the model in the Hugging Face layout."""
    return Path(__file__).resolve().parent / "model"
