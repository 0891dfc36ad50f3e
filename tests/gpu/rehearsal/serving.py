"""A server on the fake device, over HTTP: `python -m tests.gpu.rehearsal.serving NAME`, which the command calls."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.gpu.rehearsal.report import tell
from tests.gpu.rehearsal.settings import BASE, SETTINGS

START, ANSWER, STOP = 120, 30, 30
TOKENS = 32


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def post(url: str, body: dict[str, Any]) -> str:
    """The answer's text. Raises OSError where there is none."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER) as answer:
        return str(answer.read().decode())


def ready(url: str, server: subprocess.Popen[bytes]) -> bool:
    """Waits for the server; False where it ended, or takes too long."""
    limit = time.monotonic() + START
    while time.monotonic() < limit and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def ask(url: str, model: str) -> list[str]:
    """Completions at once, greedy and sampled, and a streamed chat; what was wrong with them."""
    failed = []
    body = {"model": model, "prompt": "A rehearsal", "max_tokens": TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(8) as threads:
        bodies = [{**body, "temperature": 0.8 * (i % 2), "seed": i} for i in range(8)]
        for answer in threads.map(lambda each: json.loads(post(f"{url}/v1/completions", each)), bodies):
            if answer["usage"]["completion_tokens"] != TOKENS:
                failed.append(f"a completion of {TOKENS} tokens gave {answer['usage']}")
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
    if "data: [DONE]" not in post(f"{url}/v1/chat/completions", chat):
        failed.append("a streamed chat did not end")
    return failed


def main(name: str) -> None:
    """Tells the command what failed."""
    setting = next(each for each in SETTINGS if each.name == name)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in {**BASE, **setting.changes}.items()]
    port = free_port()
    url, start = f"http://127.0.0.1:{port}", time.perf_counter()
    command = [sys.executable, "-m", "engine", "serve", setting.model, f"--port={port}", *flags]
    server = subprocess.Popen(command)
    failed = []
    try:
        if not ready(url, server):
            failed.append(f"the server did not start (exit status {server.poll()})")
        else:
            tell({"started": round(time.perf_counter() - start, 1)})
            failed += ask(url, setting.model)
    except (OSError, ValueError, KeyError) as error:
        failed.append(f"a request failed: {type(error).__name__}: {error}")
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
        try:
            status = server.wait(STOP)
            if status and not failed:
                failed.append(f"interrupted, the server ended with exit status {status}")
        except subprocess.TimeoutExpired:
            server.kill()
            failed.append(f"interrupted, the server did not end within {STOP} s")
    tell({"failed": failed} if failed else {"served": "8 completions at once, a streamed chat, an interrupt"})
    tell({"ended": True})


if __name__ == "__main__":
    main(sys.argv[1])
