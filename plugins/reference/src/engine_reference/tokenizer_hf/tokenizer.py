"""The body of tokenizer `hf`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.interfaces.context import FrontContext
from engine.types.errors import TokenizerError
from engine_kit.decoded_text import DecodedText, check_unicode
from engine_reference.tokenizer_hf.decoding import PieceDecoder, WindowDecoder
from engine_reference.tokenizer_hf.files import TokenizerFiles, read_files
from engine_reference.tokenizer_hf.pieces import compile_pieces
from engine_reference.tokenizer_hf.template import ChatTemplates
from engine_reference.tokenizer_hf.template_files import find_templates

LONG_TEXT = 4096
"""Characters from which a text is tokenised as a batch of one: that lets go of the interpreter meanwhile, which a
single `encode` of the library does not, and costs a switch of threads."""


class HFTokenizerBody(DecodedText):
    """tokenizer.json at work. See `engine.interfaces.tokenizer.Tokenizer`.

    `clean_up_tokenization_spaces` is not heeded: it removes spaces that the model wrote, and cannot be streamed.

    Raises TokenizerError where tokenizer.json is missing or broken.
    """

    def __init__(self, context: FrontContext) -> None:
        files, templates = self.read(context.folder)
        self._tokenizer = files.tokenizer
        self._longest_token = files.longest_token
        super().__init__(_decoder(files), ChatTemplates(templates, files.special, context.folder), files.special_ids)
        eos = files.special.get("eos_token")
        eos_id = None if eos is None else files.tokenizer.token_to_id(eos)
        self._eos_token_ids = () if eos_id is None else (int(eos_id),)
        self._vocab_size = max(
            files.tokenizer.get_vocab_size(with_added_tokens=False),
            max(files.tokenizer.get_added_tokens_decoder(), default=-1) + 1,
        )

    @staticmethod
    def read(folder: str) -> tuple[TokenizerFiles, dict[str, str]]:
        """What its files say, and the chat templates by name."""
        files = read_files(Path(folder))
        return files, find_templates(Path(folder), files.config)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def longest_token(self) -> int | None:
        return self._longest_token

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._encoding(text, None, add_special_tokens).ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        encoding = self._encoding(first, second, True)
        types: list[int] = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else None

    def _encoding(self, first: str, second: str | None, add_special_tokens: bool) -> Any:
        tokenizer = self._tokenizer
        try:
            if len(first) + len(second or "") < LONG_TEXT:
                return tokenizer.encode(first, second, add_special_tokens=add_special_tokens)
            texts: Any = [first if second is None else (first, second)]
            return tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)[0]
        except TypeError:
            check_unicode(first)
            check_unicode(second or "")
            raise

    def vocabulary(self) -> Sequence[bytes | None]:
        decoder = self._decoder
        if not isinstance(decoder, PieceDecoder):
            raise TokenizerError(
                "tell the bytes of each token",
                "this tokenizer's decoder does not work token by token",
                "structured outputs need one that does, as those of most language models",
            )
        special = self._hidden
        return [None if i in special else decoder.piece(i) or None for i in range(self._vocab_size)]


def _decoder(files: TokenizerFiles) -> PieceDecoder | WindowDecoder:
    rules = compile_pieces(files.decoder)
    return WindowDecoder(files.tokenizer) if rules is None else PieceDecoder(files.tokenizer, rules)
