"""Stores for tests: real ones behind the real library, where that is installed, and a double of what is used of it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import pytest

from engine_lmcache import card
from engine_lmcache.card import INSTALL

Name = tuple[str, bytes]


class Double:
    """A store in memory. It is told apart from the library by nothing that the connector uses.

    Attributes:
        there: whether it answers.
        slow: until it is set, answers wait, and all in their thread with them.
    """

    url = "double://"

    def __init__(self, folder: Path) -> None:
        self.kept: dict[Name, bytes] = {}
        self.there = True
        self.slow: threading.Event | None = None

    def __enter__(self) -> Self:
        store = self

        class Connection:
            """See `engine_lmcache.library.Connection`."""

            def __init__(self, url: str, config: Path | None, object_bytes: int) -> None:
                if not url.startswith("double://"):
                    raise ValueError(f"No adapter found for URL: {url}")
                self._size = object_bytes

            async def exists(self, names: Sequence[Name]) -> list[bool | BaseException]:
                await store.answer()
                return [name in store.kept for name in names]

            async def get(self, names: Sequence[Name]) -> list[np.ndarray | BaseException | None]:
                await store.answer()
                found = [store.kept.get(name, b"") for name in names]
                return [np.frombuffer(one, np.uint8) if len(one) == self._size else None for one in found]

            async def put(self, names: Sequence[Name], objects: Sequence[np.ndarray]) -> list[bool | BaseException]:
                await store.answer()
                store.kept |= {name: content.tobytes() for name, content in zip(names, objects, strict=True)}
                return [True] * len(names)

            async def remove(self, name: Name) -> None:
                store.kept.pop(name, None)

        module = ModuleType("engine_lmcache.library")
        module.Connection = Connection  # type: ignore[attr-defined]
        self._patch = pytest.MonkeyPatch()
        self._patch.setitem(sys.modules, module.__name__, module)
        self._patch.setattr(card, "find_spec", lambda name: module)
        return self

    async def answer(self) -> None:
        if not self.there:
            raise ConnectionRefusedError("it is gone")
        if self.slow is not None:
            self.slow.wait()

    def __exit__(self, *_: Any) -> None:
        self._patch.undo()

    def stop(self) -> None:
        self.there = False

    def start(self) -> None:
        self.there = True

    def clear(self) -> None:
        self.kept.clear()


class Folder:
    """LMCache's own files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"fs://localhost:0{folder}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def clear(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()

    def files(self) -> list[Path]:
        return sorted(self._folder.iterdir())


class Server:
    """A process on a free port, that forgets everything when it ends."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder = folder

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        self._process = subprocess.Popen(self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.05)
        raise AssertionError("the server does not start")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def clear(self) -> None:
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


REUSING = """
import socket
from lmcache.v1.server.__main__ import main
class Reusing(socket.socket):
    def bind(self, address):
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        super().bind(address)
socket.socket = Reusing
main()
"""


class LMServer(Server):
    """LMCache's own, which by itself would have to wait for a minute until it has its port again."""

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [sys.executable, "-c", REUSING, "127.0.0.1", str(self.port)]


class Redis(Server):
    """The system's."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [
            "redis-server",
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self.folder),
        ]


AnyStore = Double | Folder | LMServer | Redis
KINDS: dict[str, type[AnyStore]] = {"double": Double, "folder": Folder, "lm server": LMServer, "redis": Redis}


def why_not(kind: str) -> str:
    """Why there is no such store here; "" where there is."""
    if kind == "double":
        return ""
    if find_spec("lmcache") is None:
        return f"the library is not installed: {INSTALL}"
    try:
        import engine_lmcache.library  # noqa: F401
    except ImportError as error:
        return f"the library does not load: {error}"
    return "redis-server is not installed" if kind == "redis" and shutil.which("redis-server") is None else ""


def those(*kinds: str) -> list[Any]:
    """As parameters of fixture `kept_in`: skipped where they are not here."""
    return [pytest.param(kind, marks=pytest.mark.skipif(bool(why_not(kind)), reason=why_not(kind))) for kind in kinds]
