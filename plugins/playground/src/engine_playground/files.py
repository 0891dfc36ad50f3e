"""The page's files, as they lie in the package."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class File(NamedTuple):
    """One of them.

    Attributes:
        name: without a folder.
        content: bytes.
        media_type: by its ending.
        etag: of its content, in quotes.
    """

    name: str
    content: bytes
    media_type: str
    etag: str


def read_files() -> list[File]:
    """All, by name. They are small, and read once."""
    found = []
    for entry in sorted(files("engine_playground").joinpath("static").iterdir(), key=lambda entry: entry.name):
        ending = "." + entry.name.rpartition(".")[2]
        if ending in _MEDIA_TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append(File(entry.name, content, _MEDIA_TYPES[ending], etag))
    return found
