"""A certificate that is renewed while the server runs."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

import pytest
import trustme

from engine_server.certificate import CertificateWatch


class Files:
    """A certificate of an authority that clients know, and what a client sees of it."""

    def __init__(self, folder: Path) -> None:
        self.cert = folder / "cert.pem"
        self.key = folder / "key.pem"
        self._authority = trustme.CA()
        self._count = 0
        self.write()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.cert, self.key)

    def write(self, cert: bool = True) -> None:
        issued = self._authority.issue_cert("127.0.0.1")
        self._count += 1
        for path, content in ((self.key, issued.private_key_pem), (self.cert, issued.cert_chain_pems[0])):
            if path is self.key or cert:
                path.write_bytes(content.bytes())
                os.utime(path, (self._count, self._count))  # a clock may be coarser than this test is fast

    def shown(self) -> str:
        """The serial number that a client is shown, over buffers in memory."""
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._authority.configure_trust(trusting)
        back, forth = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting.wrap_bio(back, forth, server_hostname="127.0.0.1")
        server = self.context.wrap_bio(forth, back, server_side=True)
        for _ in range(4):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        return str((client.getpeercert() or {})["serialNumber"])


def test_a_renewed_certificate_is_shown_to_who_comes_then(tmp_path: Path) -> None:
    files = Files(tmp_path)
    watch = CertificateWatch(str(files.cert), str(files.key), lambda: files.context)
    before = files.shown()
    assert not watch.look() and not watch.look()
    files.write()
    assert not watch.look() and files.shown() == before, "it may be half written"
    assert watch.look() and files.shown() != before
    assert not watch.look()


def test_files_that_do_not_fit_leave_it_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = Files(tmp_path)
    watch = CertificateWatch(str(files.cert), str(files.key), lambda: files.context)
    before = files.shown()
    files.write(cert=False)
    with caplog.at_level(logging.ERROR):
        assert not any(watch.look() for _ in range(4))
    assert files.shown() == before and [record.levelname for record in caplog.records] == ["ERROR"]
    assert "stays as it was" in caplog.text and "key" in caplog.text
    files.cert.unlink()
    assert not any(watch.look() for _ in range(3)) and files.shown() == before
    files.write()
    assert not watch.look() and watch.look() and files.shown() != before


def test_a_server_without_one(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert not CertificateWatch(None, None, lambda: None).look()
    waiting = CertificateWatch(str(files.cert), str(files.key), lambda: None)
    files.write()
    assert not waiting.look() and not waiting.look()
