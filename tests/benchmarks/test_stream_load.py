"""The processes that read streams for `python -m tests.benchmarks api`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

from tests.benchmarks.stream_load import Streams


def test_ctrl_c_ends_it_without_a_word() -> None:
    """A terminal sends it to every process of a measurement; `python -m tests.benchmarks` answers for all of them."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        work = Streams("127.0.0.1", nobody.getsockname()[1], "/", [{"prompt": "a"}])
        command = [sys.executable, "-m", "tests.benchmarks.stream_load"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdin is not None and reader.stdout is not None and reader.stderr is not None
            print(json.dumps(asdict(work)), file=reader.stdin, flush=True)
            assert reader.stdout.readline() == "connected\n"
            print("go", file=reader.stdin, flush=True)
            reader.send_signal(signal.SIGINT)
            assert reader.wait(30) == -signal.SIGINT
            assert reader.stderr.read() == ""
