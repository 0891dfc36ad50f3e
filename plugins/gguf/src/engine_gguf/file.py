"""A GGUF file: its metadata, and where its tensors lie. Numpy alone; no tensor is read.

The format is ggml's (docs/gguf.md of its repository), versions 2 and 3, little endian:

    "GGUF", version uint32, number of tensors uint64, number of keys uint64
    each key: its name, its type uint32, its value
    each tensor: its name, number of dimensions uint32, dimensions uint64 (the innermost first), type uint32, offset
    uint64
    the tensors, from the next multiple of `general.alignment` on, each at its offset from there

A text is its length uint64 and its bytes; an array is its elements' type uint32, their number uint64, and they. Every
length is held against what is left of the file before anything is made of it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.types.errors import CheckpointError
from engine_kit.ggml_blocks import TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TEXT, _ARRAY = 8, 9
_LEAST_KEY = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 4 + 8
_NAMES = {kind.number: name for name, kind in TYPES.items()}
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Types of ggml that are not served, for people."""


@dataclass(frozen=True)
class StoredArray:
    """A tensor in a file.

    Attributes:
        file: the path.
        type: one of `TYPES`.
        shape: the outermost dimension first.
        start: of its bytes in the file.
        size: bytes.
    """

    file: str
    type: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """What a file says of itself.

    Attributes:
        metadata: values by key: numbers, texts, numpy arrays of numbers, lists of texts. Arrays that were not asked for
            are left out.
        tensors: by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredArray]


class _Reader:
    """Goes through a file, and no farther than it reaches."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._data = data
        self._end = len(data)
        self._path = path
        self.at = 0

    def broken(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"read {self._path}", found, "fetch the file again, and compare its size with the source's"
        )

    def take(self, size: int, what: str) -> int:
        """Go over so many bytes -> where they begin."""
        start = self.at
        if size > self._end - start:
            raise self.broken(
                f"{what} needs {size:,} bytes at byte {start:,}, and the file ends at {self._end:,}: it is truncated "
                "or broken"
            )
        self.at = start + size
        return start

    def number(self, form: str, size: int, what: str) -> int:
        value: int = struct.unpack_from(form, self._data, self.take(size, what))[0]
        return value

    def count(self, what: str, least: int) -> int:
        """A number of things that have so many bytes at least."""
        count = self.number("<Q", 8, f"the number of {what}")
        if count > (self._end - self.at) // least:
            raise self.broken(f"it says that there are {count:,} {what}, for which it is too small")
        return count

    def text(self, what: str) -> str:
        size = self.count(f"bytes of {what}", 1)
        start = self.take(size, what)
        return self._data[start : start + size].decode("utf-8", "replace")

    def texts(self, count: int, what: str, wanted: bool) -> list[str]:
        data, at, end, unpack = self._data, self.at, self._end, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if at + 8 > end:
                raise self.broken(f"it ends within {what}: it is truncated")
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                raise self.broken(f"it ends within {what}: it is truncated or broken")
            if wanted:
                found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int, what: str, wanted: bool) -> Any:
        if kind == _TEXT:
            return self.text(what)
        if kind == _ARRAY:
            inner = self.number("<I", 4, f"the type of {what}")
            if inner == _TEXT:
                return self.texts(self.count(what, 8), what, wanted)
            dtype = self._dtype(inner, what)
            count = self.count(what, dtype.itemsize)
            start = self.take(count * dtype.itemsize, what)
            return np.frombuffer(self._data, dtype, count, start).copy() if wanted else None
        dtype = self._dtype(kind, what)
        return np.frombuffer(self._data, dtype, 1, self.take(dtype.itemsize, what))[0].item()

    def _dtype(self, kind: int, what: str) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise self.broken(f"{what} has type {kind}, which no value has: it is broken, or of a newer format")
        return np.dtype(_SCALARS[kind])


def _none(key: str) -> bool:
    return False


def read_file(path: Path, arrays: Callable[[str], bool] = _none, tensors: bool = True) -> GGUFFile:
    """Read what a file says of itself.

    Args:
        arrays: whether a key's array is wanted.
        tensors: False leaves them aside.

    Raises CheckpointError: the file is missing, no GGUF, truncated or broken, or of a version that is not served; a
    tensor has a type that is not served.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"read {path}", error.strerror or str(error), "check the path") from error
    except ValueError as error:  # nothing in it
        raise CheckpointError(f"read {path}", "the file is empty", "fetch it again") from error
    with data:
        return _read(path, _Reader(path, data), bytes(data[:4]), arrays, tensors)


def _read(path: Path, reader: _Reader, magic: bytes, arrays: Callable[[str], bool], with_tensors: bool) -> GGUFFile:
    reader.take(4, "its mark")
    if magic != MAGIC:
        raise CheckpointError(f"read {path}", f"it begins with {magic!r}, not {MAGIC!r}", "pass a GGUF file")
    version = reader.number("<I", 4, "its version")
    if version not in VERSIONS:
        big = version & 0xFFFF == 0 and version > 0
        raise CheckpointError(
            f"read {path}",
            "it is big endian" if big else f"it is GGUF of version {version}, served are 2 and 3",
            "convert the model again" + (", for little endian" if big else " with a newer llama.cpp"),
        )
    count = reader.count("tensors", _LEAST_TENSOR)
    metadata: dict[str, Any] = {}
    for _ in range(reader.count("keys", _LEAST_KEY)):
        key = reader.text("a key")
        kind = reader.number("<I", 4, f"the type of {key:.80}")
        wanted = kind != _ARRAY or arrays(key)
        value = reader.value(kind, f"{key:.80}", wanted)
        if wanted:
            metadata[key] = value
    if not with_tensors:
        return GGUFFile(path, metadata, {})
    found = [_tensor(path, reader) for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise reader.broken(f"general.alignment is {alignment!r}, no positive number")
    reader.take(-reader.at % alignment if found else 0, "what stands in front of its tensors")
    first, tensors = reader.at, dict[str, StoredArray]()
    for name, stored_as, shape, offset in found:
        form = TYPES[stored_as]
        size = form.bytes
        for length in shape:
            size *= length
        size //= form.inputs
        reader.at = first
        reader.take(offset, f"tensor {name:.80}")
        start = reader.take(size, f"tensor {name:.80} {list(shape)} of type {stored_as}")
        if name in tensors:
            raise reader.broken(f"tensor {name:.80} is there twice")
        tensors[name] = StoredArray(str(path), stored_as, shape, start, size)
    return GGUFFile(path, metadata, tensors)


def _tensor(path: Path, reader: _Reader) -> tuple[str, str, tuple[int, ...], int]:
    """(name, type, shape, offset)."""
    name = reader.text("a tensor's name")
    dimensions = reader.number("<I", 4, f"the dimensions of {name:.80}")
    if not 1 <= dimensions <= 4:
        raise reader.broken(f"tensor {name:.80} has {dimensions} dimensions")
    shape = tuple(reader.number("<Q", 8, f"the shape of {name:.80}") for _ in range(dimensions))[::-1]
    number = reader.number("<I", 4, f"the type of {name:.80}")
    offset = reader.number("<Q", 8, f"the place of {name:.80}")
    if number not in _NAMES:
        other = f"{_OTHERS[number]} ({number})" if number in _OTHERS else str(number)
        raise CheckpointError(
            f"read {path}",
            f"tensor {name:.80} is of ggml's type {other}, served are {', '.join(TYPES)}",
            "use a file of the same model in one of these types",
        )
    kind = _NAMES[number]
    if not all(shape) or shape[-1] % TYPES[kind].inputs:
        raise reader.broken(
            f"tensor {name:.80} {list(shape)} is no whole number of blocks of {TYPES[kind].inputs}, as {kind} has them"
        )
    return name, kind, shape, offset
