"""A directory of one process group's own, where its sockets lie."""

from __future__ import annotations

import os
import tempfile

from engine.types.errors import EngineDeadError

LONGEST_SOCKET_PATH = 107
"""Bytes; what comes after is cut off by the system, or refused."""


def make_private_directory(prefix: str, longest_name: int, what: str) -> str:
    """A new directory that only this user may enter: in the system's temporary folder, or in /tmp where that folder's
    path is too long for sockets.

    Args:
        prefix: its name begins so.
        longest_name: bytes of the longest name of a socket that shall lie in it.
        what: is to be started, for the error.

    Raises EngineDeadError where none can be made: no such folder, not writable, full.
    """
    try:
        directory = tempfile.mkdtemp(prefix=prefix)
        if len(os.fsencode(directory)) + 1 + longest_name > LONGEST_SOCKET_PATH:
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
    except OSError as error:
        raise EngineDeadError(
            f"start {what}",
            f"no directory can be made for its sockets: {error}",
            "free space in the temporary folder, or name another one in TMPDIR",
        ) from error
    return directory
