"""Ports of this machine."""

from __future__ import annotations

import contextlib
import secrets
import socket


def free_port() -> int:
    """One that the system gives nobody who asks for any: no other test takes it before it is bound."""
    while True:
        port = 16_000 + secrets.randbelow(16_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
