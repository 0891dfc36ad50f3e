"""Every family of tokenizers through the suite of engine-sdk: the bundled model's goes through it with the others."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import TokenizerConformance


class _Family(TokenizerConformance):
    """Made by one of the builders."""

    driver = "hf"
    make: ClassVar[Callable[[ModuleType], Any]]
    eos: ClassVar[str] = "</s>"

    @pytest.fixture(autouse=True)
    def _folder(self, builders, tmp_path_factory):
        def make() -> str:
            folder = tmp_path_factory.mktemp("tokenizer")
            return str(builders.save(type(self).make(builders), folder, eos_token=self.eos))

        type(self).model = self.once("folder", make)


class TestByteLevel(_Family):
    make, eos = staticmethod(lambda builders: builders.byte_level()), "<|eos|>"


class TestLlama2(_Family):
    make = staticmethod(lambda builders: builders.llama2())


class TestGemma(_Family):
    make = staticmethod(lambda builders: builders.llama2(strip=False))


class TestUnigram(_Family):
    make, lossy = staticmethod(lambda builders: builders.metaspace("always")), "what its vocabulary has not is <unk>"


class TestWordPiece(_Family):
    make, eos = staticmethod(lambda builders: builders.wordpiece()), "[SEP]"
    lossy = "it parts words from punctuation"
