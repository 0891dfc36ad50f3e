"""Long texts: the ids that the library's `encode` gives, other threads go on meanwhile, and how long a token may be."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from engine.interfaces.context import FrontContext
from engine.types.errors import TokenizerError
from engine_reference.tokenizer_hf.tokenizer import LONG_TEXT, HFTokenizerBody

FAMILIES = ("byte_level", "llama2", "metaspace", "wordpiece", "no_decoder")
WORDS = st.sampled_from(
    ["Hello", " world", "  ", "\n", "ö", "你好", "😀", "<|bos|>", "<unk>", "</s>", "\u0301", "a" * 40, " " * 90, "1.5,"]
)


def opened(tokenizer: Tokenizer, builders: ModuleType, folder: Path) -> HFTokenizerBody:
    context: Any = FrontContext(folder=str(builders.save(tokenizer, folder)), files=None, model=None)  # type: ignore[arg-type]
    return HFTokenizerBody(context)


def made(builders: ModuleType, family: str) -> Tokenizer:
    make = getattr(builders, family)
    tokenizer: Tokenizer = make("always") if family == "metaspace" else make()
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_as_the_library_does_in_one_piece(family: str, builders: ModuleType, tmp_path: Path) -> None:
    body = opened(made(builders, family), builders, tmp_path)
    library = body._tokenizer

    @settings(max_examples=25, deadline=None)
    @given(st.lists(WORDS, min_size=1), st.booleans())
    def run(words: list[str], special: bool) -> None:
        text = "".join(words)
        text *= LONG_TEXT // len(text) + 1
        assert body.encode(text, special) == library.encode(text, add_special_tokens=special).ids
        first, second = text[: len(text) // 3], text[len(text) // 3 :]
        whole = library.encode(first, second)
        assert body.encode_pair(first, second)[0] == whole.ids

    run()


def test_half_a_character_in_a_long_text(builders: ModuleType, tmp_path: Path) -> None:
    body = opened(builders.byte_level(), builders, tmp_path)
    with pytest.raises(TokenizerError, match="half a surrogate pair"):
        body.encode("a" * LONG_TEXT + "\ud800")


def test_other_threads_go_on(builders: ModuleType, tmp_path: Path) -> None:
    """The library's `encode` keeps the interpreter until it is done."""
    body = opened(builders.byte_level(), builders, tmp_path)
    text = "Grüße aus Köln, the quick brown fox; " * 20_000

    def share() -> float:
        """The longest time in which this thread could not go on, of the time that it took."""
        began = before = time.perf_counter()
        longest = 0.0
        working = threading.Thread(target=body.encode, args=(text,))
        working.start()
        while working.is_alive():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        return longest / (before - began)

    assert min(share() for _ in range(3)) < 0.5


def _with(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def test_the_longest_token(builders: ModuleType, tmp_path: Path) -> None:
    def longest(tokenizer: Tokenizer) -> int | None:
        return opened(tokenizer, builders, tmp_path).longest_token

    plain = longest(builders.byte_level())
    assert plain == max(map(len, builders.byte_level().get_vocab()))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for part, expected in (
        (normalizers.NFC(), 4 * plain),  # Qwen's
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), 4 * plain),
        (normalizers.Replace("abcde", "xy"), 3 * plain),
        (normalizers.Replace("abcde", ""), None),
        (normalizers.Strip(), None),
        (normalizers.BertNormalizer(), None),
    ):
        assert longest(_with(builders.byte_level(), normalizer=part)) == expected, part
    for part, expected in (
        (pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), byte_level]), plain),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), byte_level]), None),
        (pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), byte_level]), None),
        (pre_tokenizers.Metaspace(), None),  # what is in no token is left out
    ):
        assert longest(_with(builders.byte_level(), pre_tokenizer=part)) == expected, part
    assert longest(builders.llama2()) == len("▁Hello")
    assert [longest(made(builders, family)) for family in ("metaspace", "wordpiece", "no_decoder")] == [None] * 3
