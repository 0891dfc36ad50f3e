"""The files of a model: one, or several that a splitter made of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.types.errors import CheckpointError, ModelNotFoundError
from engine_gguf.file import GGUFFile, StoredArray, read_file

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf\Z")
_SEVERAL = 8


@dataclass(frozen=True)
class GGUFModel:
    """A model's files together.

    Attributes:
        files: in their order.
        first: the one that has the metadata.
        tensors: of all files, by name.
    """

    files: tuple[Path, ...]
    first: GGUFFile
    tensors: dict[str, StoredArray]


def in_folder(folder: str) -> list[str]:
    """The names of the models in a folder: the first of several parts stands for all."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(SUFFIX))
    except OSError:
        return []
    found = []
    for name in names:
        part = _PART.match(name)
        if not name.lower().startswith("mmproj") and (part is None or int(part[2]) == 1):
            found.append(name)
    return found


def find(name: str) -> Path:
    """The file, or the first part, of what the user names: a file, or a folder with one model in it.

    Raises ModelNotFoundError: there is none, or several.
    """
    asked, path = f"open model {name!r}", Path(os.path.expanduser(name))
    if os.path.isdir(path):
        models = in_folder(str(path))
        if len(models) == 1:
            return path / models[0]
        if not models:
            raise ModelNotFoundError(
                asked, f"{path} holds no model in a {SUFFIX} file", "pass the file, or its first part"
            )
        more = ", ..." if len(models) > _SEVERAL else ""
        raise ModelNotFoundError(
            asked, f"{path} holds {len(models)} models: {', '.join(models[:_SEVERAL])}{more}", "pass one of the files"
        )
    if not os.path.isfile(path):
        near = ", ".join(in_folder(str(path.parent))[:_SEVERAL])
        remedy = f"{path.parent} has {near}" if near else "check the path"
        raise ModelNotFoundError(asked, f"there is no file {path.absolute()}", remedy)
    return path


def files_of(path: Path) -> tuple[Path, ...]:
    """All parts of the model that a file belongs to. Raises CheckpointError where some are missing."""
    part = _PART.match(path.name)
    if part is None:
        return (path,)
    count = int(part[3])
    files = tuple(path.with_name(f"{part[1]}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not count:
        raise CheckpointError(
            f"read {path}",
            f"of its {count} parts {len(missing)} are missing: {', '.join(missing[:4])}"
            + (", ..." if len(missing) > 4 else ""),
            "fetch the missing files into the same folder",
        )
    return files


def _whole(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"read {file.path}", f"its {key} is {value!r:.80}, no whole number", "fetch it again")
    return value


def read_model(files: tuple[Path, ...]) -> GGUFModel:
    """Read what the files say of themselves, without the vocabulary.

    Raises CheckpointError as `read_file`, and where they are no parts of one model.
    """
    tensors: dict[str, StoredArray] = {}
    first: GGUFFile | None = None
    for place, path in enumerate(files):
        file = read_file(path, lambda key: not key.startswith("tokenizer."))
        first = first or file
        count, number = _whole(file, "split.count", 1) or 1, _whole(file, "split.no", 0)
        if (count, number) != (len(files), place):
            found = (
                f"it says that it is part {number + 1} of {count}, and by its name it is {place + 1} of {len(files)}"
            )
            raise CheckpointError(
                f"read {path}", found, f"name the parts as they were made: ...-00001-of-00003{SUFFIX}"
            )
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"read {path}", f"tensor {name:.80} is in {tensors[name].file} too", "fetch the files again"
                )
            tensors[name] = tensor
    assert first is not None
    stated = _whole(first, "split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise CheckpointError(
            f"read {files[0]}", f"its parts have {len(tensors)} tensors, not the {stated} it states", "fetch them again"
        )
    return GGUFModel(files, first, tensors)
