"""From one token to the bytes that it stands for.

Most tokenizers of language models decode token by token: a byte-level BPE writes each byte as one printable character
(GPT-2), a sentencepiece-style one writes a blank as U+2581 and a byte it has no token for as "<0x0A>". For these the
text of a sequence is the UTF-8 decoding of its tokens' bytes, which can be done incrementally, exactly, and in
constant time a token. `compile_pieces` recognises them; it answers None for any other decoder.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import AddedToken

_KEEP = frozenset({"ByteLevel", "NFD", "NFKD", "Lowercase", "Prepend", "Metaspace", "Digits", "UnicodeScripts"})
"""Normalisers and pre-tokenisers that leave no character out, and make no two of them one."""
_COMPOSED = 4
"""The most characters that NFC and NFKC make one (U+1F82 has four parts)."""
_BYTES = frozenset(f"<0x{value:02X}>" for value in range(256))


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True)
class PieceRules:
    """How a tokenizer's tokens become bytes.

    Attributes:
        byte_level: characters are bytes in GPT-2's alphabet.
        byte_fallback: tokens of the form "<0x0A>" are bytes.
        replace: (old, new) pairs applied to every other token.
        drop_first: characters that the sequence's first token loses (Metaspace's word mark), or "".
        strip, strip_left: up to so many leading occurrences of this character leave the whole text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    drop_first: str = ""
    strip: str = ""
    strip_left: int = 0

    def piece(self, token: str, alphabet: dict[str, int]) -> bytes:
        """A token's bytes, anywhere but at the start of a sequence."""
        if self.byte_level:
            try:
                return bytes([alphabet[character] for character in token])
            except KeyError:  # an added token with a character outside the alphabet stands for itself
                return token.encode("utf-8", "replace")
        for old, new in self.replace:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match[1], 16)])
        return token.encode("utf-8", "replace")


def compile_pieces(decoder: dict[str, Any] | None) -> PieceRules | None:
    """Rules for tokenizer.json's decoder; None where it does not work token by token."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0].get("replacement", "▁")
        # Older files say add_prefix_space, newer ones prepend_scheme.
        never = steps[0].get("prepend_scheme", "always") == "never" or steps[0].get("add_prefix_space") is False
        return PieceRules(replace=((mark, " "),), drop_first="" if never else mark)
    replace: list[tuple[str, str]] = []
    while steps and kinds[0] == "Replace":
        pattern = steps[0].get("pattern", {})
        if "String" not in pattern:
            return None
        replace.append((pattern["String"], steps[0].get("content", "")))
        steps, kinds = steps[1:], kinds[1:]
    if kinds == ["ByteFallback", "Fuse"]:
        return PieceRules(byte_fallback=True, replace=tuple(replace))
    if kinds == ["ByteFallback", "Fuse", "Strip"]:
        strip = steps[2]
        if strip.get("stop", 0) or len(strip.get("content", "")) != 1:
            return None
        return PieceRules(
            byte_fallback=True, replace=tuple(replace), strip=strip["content"], strip_left=int(strip.get("start", 0))
        )
    return None


def gpt2_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for 256 and up (Radford 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


class TokenizerModel(msgspec.Struct):
    """What is read of tokenizer.json's model: how it takes what it does not know."""

    type: str | None = None
    unk_token: Any = None
    fuse_unk: bool | None = None
    byte_fallback: bool | None = None


def longest_token(
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    model: TokenizerModel,
    added: Collection[AddedToken],
    vocabulary: Collection[str],
) -> int | None:
    """The most characters of a text that one token stands for; None where there is no such number, as in tokenizers
    that leave blanks out, or make one token of any number of characters that they do not know.

    Args:
        normalizer, pre_tokenizer, model: parts of tokenizer.json.
        added: tokens that are looked for before all else.
        vocabulary: every token, as the model writes it; added ones too.
    """
    steps = [*_steps(normalizer, "normalizers"), *_steps(pre_tokenizer, "pretokenizers")]
    length = max(map(len, vocabulary), default=0)
    for step in steps:
        shrink = _shrink(step)
        if shrink is None:
            return None
        length *= shrink
    knows_bytes = any(step.get("type") == "ByteLevel" for step in steps) and gpt2_alphabet().keys() <= set(vocabulary)
    knows_bytes = knows_bytes or (bool(model.byte_fallback) and set(vocabulary) >= _BYTES)
    one_each = model.unk_token is not None and not model.fuse_unk
    if model.type != "BPE" or not (knows_bytes or one_each):
        return None
    if any(token.lstrip or token.rstrip for token in added):  # they take the blanks beside them
        return None
    return length or None


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for inner in part[name] for step in _steps(inner, name)] if part.get("type") == "Sequence" else [part]


def _shrink(step: dict[str, Any]) -> int | None:
    """How many characters of its input one of its output stands for at most; None: any number."""
    kind = step.get("type")
    if kind in _KEEP:
        return 1
    if kind in ("NFC", "NFKC"):
        return _COMPOSED
    if kind in ("Split", "Punctuation"):
        return None if step.get("behavior", "Removed") == "Removed" else 1
    if kind == "Replace" and (found := step.get("pattern", {}).get("String")) and (content := step.get("content")):
        return -(-len(found) // len(content))
    return None
