"""The secret that all machines of an engine share, and the keys that are made of it.

The head's secret key is derived from the token, and so is the public one: who joins knows the key that the head must
have, and nobody who does not know the token knows the head's public key, without which no handshake of CURVE begins.
So each end proves that it has the token, and the token is never sent. What is said is encrypted by keys that both ends
make anew for each connection: who learns the token later cannot read what was said before.

Who listens to a handshake can try tokens on it, so one that people would choose is refused: it has to be long.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import zmq
from zmq.utils import z85

from engine.types.errors import ConfigError

SHORTEST = 32
"""Characters of a token. `python -c "import secrets; print(secrets.token_urlsafe(32))"` makes one."""
_SALT = b"engine-nodes: the head, 1"


def read_token(path: str | None, asked: str) -> bytes:
    """The token in a file. Raises ConfigError: there is none, others may read it, or it is too short."""
    make = '(umask 077; python -c "import secrets; print(secrets.token_urlsafe(32))" > FILE)'
    if not path:
        raise ConfigError(asked, "no token is named, and who joins has to prove that it may", f"{make}; name it there")
    try:
        with Path(path).open("rb") as file:
            found, token = os.fstat(file.fileno()), file.read().strip()
    except OSError as error:
        raise ConfigError(f"{asked}={path}", error.strerror or str(error), make) from error
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{asked}={path}", "it is another user's, who may change it", f"chown it, or make one: {make}"
        )
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{asked}={path}", "others than its owner may read it, or change it", f"chmod 600 {path}")
    if len(token) < SHORTEST:
        raise ConfigError(f"{asked}={path}", f"{len(token)} characters can be guessed; {SHORTEST} are the least", make)
    return token


def head_keys(token: bytes) -> tuple[bytes, bytes]:
    """The head's public and secret key."""
    secret = z85.encode(hashlib.scrypt(token, salt=_SALT, n=2**14, r=8, p=1, dklen=32))
    return zmq.curve_public(secret), secret
