"""The cards of the tokenizers `mistral` and `sentencepiece`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from engine.interfaces.tokenizer import TokenizerCard, TokenizerNeed
from engine.types.errors import TokenizerError
from engine_reference.tokenizer_hf.template_files import template_of
from engine_tokenizers.files import MODEL, mistral_file

_TOOLS_FROM = 2
"""The first version of Mistral's conversations that has tools."""


class MistralTokenizerCard(TokenizerCard):
    """A folder with a file as Mistral writes it: tekken.json, or tokenizer.model.v3 with another version at its end.
    Where tokenizer.json lies beside it, that is read unless somebody asks for this."""

    body = "engine_tokenizers.mistral:MistralTokenizerBody"
    priority = -10

    @classmethod
    def unsupported(cls, need: TokenizerNeed) -> list[str]:
        """Reasons where there is no such file, or the library that reads it is not installed."""
        folder = Path(need.folder)
        try:
            file = mistral_file(folder)
        except TokenizerError as error:
            return [str(error)]
        if file is None:
            found = f"'{need.folder}' has neither tekken.json nor a tokenizer.model.v3 (or another version)"
            if (folder / MODEL).is_file():
                found += f"; if its {MODEL} is Mistral's first, call it {MODEL}.v1"
            return [found]
        lacking = [] if _is_installed("mistral_common") else ["mistral-common"]
        lacking += [] if file.tekken or _is_installed("sentencepiece") else ["sentencepiece"]
        return [f"{name} is not installed, which reads {file.path.name}: pip install {name}" for name in lacking]

    @classmethod
    def chat_template(cls, folder: str, with_tools: bool) -> str:
        """What stands for a template, which mistral-common has none of: a comment that names the tokens by which
        parsers recognise a model, and tools where its version has them."""
        file = mistral_file(Path(folder))
        if file is None:
            return ""
        tools = " [AVAILABLE_TOOLS] tools [TOOL_CALLS] [TOOL_RESULTS]" if file.version >= _TOOLS_FROM else ""
        return f"{{# mistral-common, version {file.version}: [INST]{tools} #}}"


class SentencePieceCard(TokenizerCard):
    """A folder with tokenizer.model alone. Where tokenizer.json lies beside it, that is read unless somebody asks for
    this."""

    body = "engine_tokenizers.sentencepiece_model:SentencePieceBody"
    priority = -10

    @classmethod
    def unsupported(cls, need: TokenizerNeed) -> list[str]:
        """Reasons where there is no such file, Mistral's lie beside it, or the library is not installed."""
        folder = Path(need.folder)
        if not (folder / MODEL).is_file():
            return [f"'{need.folder}' has no {MODEL}"]
        try:
            mistral = mistral_file(folder)
        except TokenizerError as error:
            return [str(error)]
        if mistral is not None:
            return [f"'{need.folder}' has {mistral.path.name} too, which says more: tokenizer 'mistral' reads it"]
        if not _is_installed("sentencepiece"):
            return [f"sentencepiece is not installed, which reads {MODEL}: pip install sentencepiece"]
        return []

    @classmethod
    def chat_template(cls, folder: str, with_tools: bool) -> str:
        """As its files have it."""
        return template_of(Path(folder), with_tools)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
