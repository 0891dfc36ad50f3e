"""The server's TLS files, looked at before the model is loaded."""

from __future__ import annotations

import ssl

from engine.types.errors import ConfigError


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


def _no_password() -> bytes:
    remedy = "unlock it: openssl pkey -in LOCKED -out KEY"
    raise ConfigError("read the certificate's key", "it is locked by a password", remedy)
