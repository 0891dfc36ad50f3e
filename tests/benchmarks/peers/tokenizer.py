"""A byte-level BPE tokenizer of any size that every engine can load. The measurements pass token ids, not text."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>")


def _byte_characters() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary: printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer_json(vocab_size: int) -> dict[str, Any]:
    """The file's content. After special tokens and bytes come all words of 2, 3, ... small letters, each merged from
    the word that is one shorter and its last letter, until there are `vocab_size` tokens (at least 259)."""
    tokens = [*SPECIAL, *_byte_characters()]
    if vocab_size < len(tokens):
        raise ValueError(f"a vocabulary of {vocab_size}: special tokens and bytes are {len(tokens)}")
    letters = string.ascii_lowercase
    words = ("".join(word) for length in itertools.count(2) for word in itertools.product(letters, repeat=length))
    merged = list(itertools.islice(words, vocab_size - len(tokens)))
    added = [
        {
            "id": i, "content": token, "special": True,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }
        for i, token in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate([*tokens, *merged])},
            "merges": [f"{word[:-1]} {word[-1]}" for word in merged],
        },
    }


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocab_size), ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
