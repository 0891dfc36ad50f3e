"""The drivers of this package through the suite of engine-sdk."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
pytest.importorskip("mistral_common", reason="mistral-common is not installed")

from small_tokenizers import TEMPLATE, write_config, write_model, write_tekken

from engine_sdk.conformance import TokenizerConformance


class _Small(TokenizerConformance):
    """Over files that are written once."""

    model: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def _writes(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        type(self).model = self.once("written", lambda: self.written(tmp_path_factory.mktemp("tokenizer")))

    @classmethod
    def written(cls, folder: Path) -> str:
        raise NotImplementedError


class TestSentencePiece(_Small):
    driver = "sentencepiece"

    @classmethod
    def written(cls, folder: Path) -> str:
        write_config(folder, chat_template=TEMPLATE, add_bos_token=True)
        return write_model(folder)


class TestUnigram(_Small):
    """Another way to find pieces, which makes NFKC of a text first, and does not know every character."""

    driver = "sentencepiece"
    lossy = "characters are normalised, extra blanks are taken away, and unknown characters are one token"

    @classmethod
    def written(cls, folder: Path) -> str:
        write_config(folder, chat_template=TEMPLATE)
        options = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True, "byte_fallback": False}
        return write_model(folder, kind="unigram", **options | {"vocab_size": 100})


class TestMistral(_Small):
    """tekken.json."""

    driver = "mistral"

    @classmethod
    def written(cls, folder: Path) -> str:
        return write_tekken(folder)


class TestMistralModel(_Small):
    """A sentencepiece model with Mistral's tokens."""

    driver = "mistral"

    @classmethod
    def written(cls, folder: Path) -> str:
        control = "[INST],[/INST],[TOOL_CALLS],[AVAILABLE_TOOLS],[/AVAILABLE_TOOLS],[TOOL_RESULTS],[/TOOL_RESULTS]"
        return write_model(folder, "tokenizer.model.v3", control_symbols=control)
