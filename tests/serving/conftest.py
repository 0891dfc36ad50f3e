"""A real server on a free port, started as a user starts it and stopped by process id."""

from __future__ import annotations

import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import openai
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 90


class Server:
    """`engine serve ARGS --port 0`, or another `command`, as a child process. `program` stands in for `engine`;
    `python`, `cwd` and `environment` for this test's own; `trust` knows its certificate, where it serves HTTPS."""

    def __init__(
        self,
        *args: str,
        command: str = "serve",
        program: Sequence[str] = ("-m", "engine"),
        python: str = sys.executable,
        cwd: str | None = None,
        environment: dict[str, str] | None = None,
        trust: ssl.SSLContext | bool = True,
    ) -> None:
        self.lines: list[str] = []
        self.trust = trust
        self.process = subprocess.Popen(
            [python, *program, command, *args, "--port", "0"],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._listening = threading.Event()
        self.address = ""
        threading.Thread(target=self._read, daemon=True).start()
        deadline = time.monotonic() + START_SECONDS
        while not self._listening.wait(0.1):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError("the server did not start:\n" + "".join(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if not self.address and (found := re.search(r"https?://[\d.]+:\d+", line)):
                self.address = found.group()
                self._listening.set()

    def client(self, **options: object) -> openai.OpenAI:
        """The official client, unmodified."""
        defaults = {"api_key": "none", "max_retries": 0, "timeout": 60}
        return openai.OpenAI(base_url=self.address + "/v1", **(defaults | options))

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.address.rsplit(":", 1)[1])

    def metrics(self) -> dict[str, float]:
        """What `/metrics` says, read by Prometheus' own parser; the labels of the model and of the first engine core
        left out of the names."""
        text = httpx.get(self.address + "/metrics", timeout=30, verify=self.trust).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name" and (k, v) != ("engine", "0")}
                shown = ",".join(f"{k}={v}" for k, v in labels.items())
                found[sample.name.removeprefix("engine:") + (f"{{{shown}}}" if shown else "")] = sample.value
        return found

    def until(self, condition: Callable[[dict[str, float]], bool], what: str, seconds: float = 30) -> dict[str, float]:
        """Read the metrics until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition(found := self.metrics()):
            assert time.monotonic() < deadline, f"{what}: never, in {seconds} s; {found}"
            time.sleep(0.05)  # to write and to read them takes the two of us 15 ms
        return found

    def until_idle(self, seconds: float = 30) -> dict[str, float]:
        """Wait until nothing runs, waits or holds a page."""
        names = ("num_requests_running", "num_requests_waiting", "kv_pages_used")
        return self.until(lambda m: all(m[name] == 0 for name in names), "the engine is idle", seconds)

    def core_pid(self) -> int:
        """The engine core's process: the server's only child."""
        import psutil

        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1, children
        return children[0].pid

    def stop(self) -> int:
        """SIGTERM, then wait; SIGKILL after 30 s. The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError("the server did not stop within 30 s of SIGTERM") from None
        return self.process.returncode


class Certificate:
    """`cert.pem` for 127.0.0.1, `key.pem`, and `ca.pem` of the authority that is made for it, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self._folder = folder
        self.authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        self.renew()

    def renew(self) -> None:
        """Issue another, in the same files."""
        issued = self.authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(self._folder / "key.pem"))
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        (self._folder / "cert.pem").write_bytes(chain)

    @property
    def flags(self) -> list[str]:
        """What the server is started with."""
        names = {"certfile": "cert.pem", "keyfile": "key.pem"}
        return [f"--ssl-{name}={self._folder / file}" for name, file in names.items()]

    def trust(self) -> ssl.SSLContext:
        """A client's, which knows the authority."""
        return ssl.create_default_context(cafile=str(self._folder / "ca.pem"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server with the bundled model, in float64: a batch must not change an answer, not even by rounding."""
    running = Server("tiny", "--dtype", "float64", "--max-num-seqs", "64")
    yield running
    assert running.stop() == 0, "".join(running.lines)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    """The official client of that server."""
    return server.client()
