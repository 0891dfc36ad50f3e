"""The card of tokenizer `gguf`."""

from __future__ import annotations

from pathlib import Path

from engine.interfaces.tokenizer import TokenizerCard, TokenizerNeed
from engine.types.errors import CheckpointError, TokenizerError
from engine_gguf.file import GGUFFile, read_file
from engine_gguf.parts import SUFFIX
from engine_gguf.vocabulary import templates, unsupported


class GGUFTokenizer(TokenizerCard):
    """The vocabulary and the chat template in a GGUF file."""

    body = "engine_gguf.tokenizer:GGUFTokenizerBody"

    @classmethod
    def unsupported(cls, need: TokenizerNeed) -> list[str]:
        """Reasons where there is no such file, or its vocabulary is of another kind."""
        path = Path(need.folder)
        if not need.folder.lower().endswith(SUFFIX) or not path.is_file():
            return [f"'{need.folder}' is not a GGUF file"]
        try:
            return unsupported(read_file(path, tensors=False))
        except CheckpointError as error:
            return [str(error)]

    @classmethod
    def chat_template(cls, folder: str, with_tools: bool) -> str:
        """As the file has it."""
        found = templates(_read(folder))
        default = found.get("default", "")
        return found.get("tool_use", default) if with_tools else default


def _read(path: str) -> GGUFFile:
    try:
        return read_file(Path(path), tensors=False)
    except CheckpointError as error:
        raise TokenizerError(error.asked, error.found, error.remedy) from error
