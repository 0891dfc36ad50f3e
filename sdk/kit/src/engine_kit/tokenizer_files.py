"""Which files of a folder are a tokenizer's, whichever driver reads them, for those who ask whether two folders hold
the same one. Light: cards and API servers ask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import file_digest, sha256
from pathlib import Path

TEMPLATES = ("additional_chat_templates", "chat_templates")
"""Folders of chat templates beside the default one."""
_NAMES = re.compile(
    r".*tokenizer.*|.*tekken.*\.json|.*\.(model|tiktoken)(\.v\w+)?|vocab\..*|merges\.txt"
    r"|(special_tokens_map|added_tokens)\.json|chat_template\..*",
    re.DOTALL,
)


def tokenizer_files(folder: str | Path) -> Iterator[str]:
    """Names of what says how a text becomes tokens and a conversation a text, from the folder on; in order. Raises
    OSError where the folder cannot be listed."""
    place = Path(folder)
    for path in sorted(place.iterdir()):
        if _NAMES.fullmatch(path.name) and path.is_file():
            yield path.name
    for name in TEMPLATES:
        for path in sorted((place / name).glob("*.jinja")):
            yield f"{name}/{path.name}"


def tokenizer_hash(folder: str | Path) -> str:
    """Of these files and of their names: the same for copies alone. Raises OSError where one cannot be read."""
    found = sha256()
    for name in tokenizer_files(folder):
        with open(Path(folder, name), "rb") as file:
            found.update(name.encode(errors="surrogateescape") + b"\0" + file_digest(file, "sha256").digest())
    return found.hexdigest()
