"""Which files of a folder are a tokenizer's, and what they say before a library reads them. Light: cards ask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.types.errors import TokenizerError

MODEL = "tokenizer.model"
"""A sentencepiece model, under the name that it has in folders of Hugging Face."""
_VERSIONED = re.compile(r".*\.model\.v(\d+)(m\d+)?")
_TEKKEN = re.compile(r"tekken(_\d+)?\.json")
"""As Mistral calls it, with a date or without."""
_NORMALIZER, _NAME, _DUMMY_PREFIX, _EXTRA_WHITESPACES = 3, 1, 3, 4
"""Fields of sentencepiece_model.proto: `ModelProto.normalizer_spec`, and of that `name`, `add_dummy_prefix` and
`remove_extra_whitespaces`."""
NO_PREFIX = b"\x1a\x02\x18\x00"
"""Behind a model's bytes, `normalizer_spec { add_dummy_prefix: false }`: of messages in one field the later goes before
the earlier."""


class MistralFile(NamedTuple):
    """A tokenizer's file as Mistral writes it.

    Args:
        path: where it is.
        version: of the form in which conversations are written, from 1.
        tekken: it is JSON of byte pairs; else a sentencepiece model.
    """

    path: Path
    version: int
    tekken: bool


class _TekkenConfig(msgspec.Struct):
    version: str


class _Tekken(msgspec.Struct):
    config: _TekkenConfig


def mistral_file(folder: Path) -> MistralFile | None:
    """The one of the highest version in a folder, tekken before others; None where there is none. Raises TokenizerError
    for JSON that is none."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    tekkens = [(_tekken_version(folder / name), name) for name in names if _TEKKEN.fullmatch(name)]
    if tekkens:
        return MistralFile(folder / max(tekkens)[1], max(tekkens)[0], True)
    found = [(int(match[1]), name) for name in names if (match := _VERSIONED.fullmatch(name))]
    return MistralFile(folder / max(found)[1], max(found)[0], False) if found else None


def _tekken_version(path: Path) -> int:
    try:
        version = msgspec.json.decode(path.read_bytes(), type=_Tekken).config.version
        return int(version.removeprefix("v"))
    except (msgspec.MsgspecError, ValueError, OSError) as error:
        raise TokenizerError(f"read '{path}'", f"it is no file of tekken: {error}", "download it again") from error


class Normalizer(NamedTuple):
    """What a sentencepiece model does to a text before it looks for pieces.

    Args:
        name: of the rules, e.g. "identity" or "nmt_nfkc".
        add_dummy_prefix: a blank is put before it.
        remove_extra_whitespaces: blanks are taken away.
    """

    name: str
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    @property
    def keeps(self) -> bool:
        """No character is taken away or made another."""
        return self.name == "identity" and not self.remove_extra_whitespaces


def normalizer_of(model: bytes) -> Normalizer:
    """Of the bytes of a tokenizer.model. Raises ValueError where they are none."""
    spec: dict[int, bytes | int] = {}
    for number, value in _fields(model):
        if number == _NORMALIZER and isinstance(value, bytes):
            spec |= dict(_fields(value))
    name = spec.get(_NAME, b"")
    return Normalizer(
        name.decode("utf-8", "replace") if isinstance(name, bytes) else "",
        bool(spec.get(_DUMMY_PREFIX, True)),
        bool(spec.get(_EXTRA_WHITESPACES, True)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of a protobuf message's fields: bytes where they have a length, else an integer; those of a fixed
    size are passed over."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif key & 7 == 2:
            size, at = _varint(data, at)
            yield key >> 3, data[at : at + size]
            at += size
        elif key & 7 in (1, 5):
            at += 8 if key & 7 == 1 else 4
        else:
            raise ValueError("it is no protobuf message")
    if at != len(data):
        raise ValueError("it ends within a field")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("it ends within a number")
