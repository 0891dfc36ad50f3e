"""A real server with an API key, started as a user starts it, and a real browser where there is one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

KEY = "a-key-of-the-tests"
START_SECONDS = 90
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Served:
    """`engine serve tiny` as a child process, on a free port."""

    key = KEY

    def __init__(self, *flags: str) -> None:
        self.lines: list[str] = []
        self._listening = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", "tiny", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        deadline = time.monotonic() + START_SECONDS
        while not self._listening.wait(0.05):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError("the server did not start:\n" + "".join(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                self.address = found.group()
                self._listening.set()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError("the server did not stop within 30 s of SIGTERM") from None
        return self.process.returncode


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server, with a page pool that is soon seen to fill."""
    running = Served("--api-key", KEY, "--num-kv-pages", "600", "--hooks.playground.refresh", "0.2")
    yield running
    assert running.stop() == 0, "".join(running.lines)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium through Playwright; without either, these tests are skipped. One module's, because Playwright
    runs an event loop on this thread while it is open, beside which no coroutine of another test could run."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
    path = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    with api.sync_playwright() as playwright:
        if path is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip("no Chromium is installed (apt install chromium, or playwright install chromium)")
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any, served: Served) -> Iterator[Callable[..., Any]]:
    """Opens the page. At the end nothing may have been logged as an error, nor asked of another host.

    Its `expected` are errors that the test provokes: texts of which each logged error must hold one.
    """
    contexts, faults, strangers = [], [], []

    def open_it(key: str | None = KEY, expected: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()

        def note(text: str) -> None:
            if not any(part in text for part in expected):
                faults.append(text)

        page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: note(str(error)))
        page.on("request", lambda r: None if r.url.startswith(served.address) else strangers.append(r.url))
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('engine-playground-key', {key!r})")
        page.goto(served.address + "/")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert (faults, strangers) == ([], [])
