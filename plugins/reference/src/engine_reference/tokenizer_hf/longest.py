"""How much of a text one token can stand for: what a text has at least, before it is tokenised."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from tokenizers import AddedToken

from engine_reference.tokenizer_hf.pieces import gpt2_alphabet

_KEEP = frozenset({"ByteLevel", "NFD", "NFKD", "Lowercase", "Prepend", "Metaspace", "Digits", "UnicodeScripts"})
"""Normalisers and pre-tokenisers that leave no character out, and make no two of them one."""
_COMPOSED = 4
"""The most characters that NFC and NFKC make one (U+1F82 has four parts)."""
_BYTES = frozenset(f"<0x{value:02X}>" for value in range(256))


class Model(msgspec.Struct):
    """What is read of tokenizer.json's model: how it takes what it does not know."""

    type: str | None = None
    unk_token: Any = None
    fuse_unk: bool | None = None
    byte_fallback: bool | None = None


def longest_token(
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    model: Model,
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
