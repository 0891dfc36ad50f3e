"""The server's TLS files: looked at before the model is loaded, and read again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from engine.types.errors import ConfigError
from engine_server.lifecycle import LOOK_SECONDS, state_of_files

log = logging.getLogger("engine.server")


def check_certificate(certfile: str | None, keyfile: str | None, ca_certs: str | None) -> None:
    """See that the files can be used together. Raises ConfigError."""
    if certfile is None:
        if given := keyfile or ca_certs:
            raise ConfigError(
                f"serve HTTPS with {given!r}", "there is no certificate", "pass --ssl-certfile too, or serve HTTP"
            )
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asked = f"serve HTTPS with the certificate {certfile!r}" + (f" and the key {keyfile!r}" if keyfile else "")
    try:
        # A key that asks for a password would wait for somebody to type it.
        context.load_cert_chain(certfile, keyfile, password=_no_password)
        if ca_certs is not None:
            asked = f"ask clients for certificates of {ca_certs!r}"
            context.load_verify_locations(ca_certs)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # of files, and of OpenSSL
        found = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        remedy = "check that the files exist, are PEM, and that the key belongs to the certificate"
        raise ConfigError(asked, str(found), remedy) from error


class CertificateWatch:
    """Gives a running server the certificate anew when its files have changed: connections that come then see it,
    those that stand keep theirs. The authorities of clients' certificates stay as they were.

    `context` tells what new connections are made with: None before the server listens, and where it serves HTTP.
    """

    def __init__(self, certfile: str | None, keyfile: str | None, context: Callable[[], ssl.SSLContext | None]) -> None:
        self._certfile = certfile
        self._keyfile = keyfile
        self._context = context
        self._taken = self._seen = state_of_files(certfile, keyfile)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while self._certfile is not None:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> bool:
        """Take what has changed, once it has been the same for two looks: certificate and key are written one after the
        other. Files that cannot be used leave the server with what it has, and are logged once. Returns whether it did.
        """
        before, self._seen = self._seen, state_of_files(self._certfile, self._keyfile)
        context = self._context()
        if self._certfile is None or context is None or self._seen in (self._taken, ()) or self._seen != before:
            return False
        self._taken = self._seen
        try:
            check_certificate(self._certfile, self._keyfile, None)
            context.load_cert_chain(self._certfile, self._keyfile, password=_no_password)
        except (ConfigError, OSError, ValueError) as error:
            log.error("the certificate stays as it was: %s", error)
            return False
        log.warning("the certificate was read again: %s", self._certfile)
        return True


def _no_password() -> bytes:
    remedy = "unlock it: openssl pkey -in LOCKED -out KEY"
    raise ConfigError("read the certificate's key", "it is locked by a password", remedy)
