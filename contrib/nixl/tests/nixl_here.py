"""Whether the library can be used here, and ports for those that use it."""

from __future__ import annotations

import contextlib
import secrets
import socket
from importlib.util import find_spec

from engine_nixl.card import PACKAGES


def why_not() -> str:
    """ "" where it can."""
    if any(map(find_spec, PACKAGES)):
        return ""
    return "the library is not installed: pip install 'engine-nixl[cu12]' (or [cu13])"


def free_port() -> int:
    """One that the system gives nobody who asks for any: no other test takes it before it is bound."""
    while True:
        port = 16_000 + secrets.randbelow(16_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
