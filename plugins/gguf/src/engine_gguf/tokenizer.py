"""The body of tokenizer `gguf`: the file's vocabulary as a tokenizer.json, at work as any other."""

from __future__ import annotations

from pathlib import Path

from engine.types.errors import CheckpointError, TokenizerError
from engine_gguf.file import read_file
from engine_gguf.vocabulary import special_tokens, templates, tokenizer_json
from engine_reference.tokenizer_hf.files import TokenizerFiles, files_of
from engine_reference.tokenizer_hf.tokenizer import HFTokenizerBody


class GGUFTokenizerBody(HFTokenizerBody):
    """See `engine.interfaces.tokenizer.Tokenizer`. Raises TokenizerError for a file that is broken or not served."""

    @staticmethod
    def read(folder: str) -> tuple[TokenizerFiles, dict[str, str]]:
        """Of a file."""
        try:
            file = read_file(Path(folder), lambda key: key.startswith("tokenizer.ggml."), tensors=False)
        except CheckpointError as error:
            raise TokenizerError(error.asked, error.found, error.remedy) from error
        return files_of(tokenizer_json(file), folder, {}, special_tokens(file), {}), templates(file)
