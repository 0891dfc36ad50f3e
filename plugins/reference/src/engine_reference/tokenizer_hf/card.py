"""The card of tokenizer `hf`."""

from __future__ import annotations

from pathlib import Path

from engine.interfaces.tokenizer import TokenizerCard, TokenizerNeed
from engine_reference.tokenizer_hf.template_files import template_of


class HFTokenizer(TokenizerCard):
    """A folder with `tokenizer.json`, in the forms that transformers 4 and 5 write."""

    body = "engine_reference.tokenizer_hf.tokenizer:HFTokenizerBody"

    @classmethod
    def unsupported(cls, need: TokenizerNeed) -> list[str]:
        """A reason where the folder holds no tokenizer.json."""
        folder = Path(need.folder)
        if (folder / "tokenizer.json").is_file():
            return []
        if not folder.is_dir():
            return [f"'{need.folder}' is not a folder"]
        others = sorted(path.name for path in folder.iterdir() if "token" in path.name or "vocab" in path.name)
        found = f"it holds {', '.join(others)}" if others else "it holds no tokenizer file"
        return [f"'{need.folder}' has no tokenizer.json ({found})"]

    @classmethod
    def chat_template(cls, folder: str, with_tools: bool) -> str:
        """As its files have it."""
        return template_of(Path(folder), with_tools)
