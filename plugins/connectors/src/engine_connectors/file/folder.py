"""A folder of pages, one file each. No torch.

    PATH/engine-kv/<2 digits>/<key>.<tp>.<pp>

Whoever writes makes a file of another name and renames it when it is whole, so a reader finds a page whole or not at
all, and no lock is needed that an engine could die with. A file's time of modification is when its page was last used:
that is the order in which files are given up, by whichever engine finds the folder too large.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from engine.types.errors import ConfigError
from engine_connectors.pages import FRAME_BYTES, Place, frame, is_whole

logger = logging.getLogger(__name__)

TOP = "engine-kv"
"""All that stands below the user's folder: nothing else there is looked at."""
_SLACK = 64
"""The folder is looked through when this rank has written 1/64 of its bound; files are then given up until so many
64ths of it are free as make room for other writers."""
_FREE = 4
_UNFINISHED_SECONDS = 600.0
"""After which a file that nobody finished is taken for a dead engine's."""
_PAUSE_SECONDS = 10.0
"""For so long nothing is written after the system refused to."""


def folder_of(path: str) -> Path:
    """Where the pages lie below the user's folder; it is made where it is not there.

    Raises ConfigError where it cannot be written.
    """
    folder = Path(path).expanduser() / TOP
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / _unfinished()
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"keep pages in {path}",
            f"{error.strerror or error} ({error.filename})",
            "name a folder that this user may write: --kv-connector.path DIR",
        ) from error
    return folder


class FolderDirectory:
    """See `engine_connectors.pages.Directory`.

    Args:
        folder: of `folder_of`.
        places: of all ranks.
    """

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        self._folder = str(folder)
        self._places = places

    def has(self, keys: Sequence[bytes]) -> Iterator[bool]:
        """A system call for each page and rank, as they are asked for: of a prompt that nobody has sent before, one."""
        return (all(os.path.exists(_file_of(self._folder, key, place)) for place in self._places) for key in keys)

    def close(self) -> None:
        """Nothing is open."""


class FolderStore:
    """See `engine_connectors.pages.Store`.

    Args:
        folder: of `folder_of`.
        place: this rank's.
        size: bytes that all files in the folder may have.
        fsync: whether a page is on the disk before it can be found.
    """

    def __init__(self, folder: Path, place: Place, size: int, fsync: bool) -> None:
        self._folder = str(folder)
        self._place = place
        self._size = size
        self._fsync = fsync
        self._lock = threading.Lock()
        self._trimming = threading.Lock()
        self._written = size  # since the folder was looked through: a new engine looks at once
        self._paused_until = 0.0
        self._counts = {"damaged": 0, "refused": 0, "given_up": 0}

    def get(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """Read straight into the pages."""
        return [self._read(key, page) for key, page in zip(keys, pages, strict=True)]

    def put(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """What is there already is not written again."""
        kept = [self._write(key, page) for key, page in zip(keys, pages, strict=True)]
        if self._written > self._size // _SLACK and self._trimming.acquire(blocking=False):
            try:
                self.trim()
            finally:
                self._trimming.release()
        return kept

    def touch(self, keys: Sequence[bytes]) -> None:
        """The first key's file gets the latest time."""
        now = time.time_ns()
        for place, key in enumerate(keys):
            with suppress(OSError):  # it has been given up
                os.utime(_file_of(self._folder, key, self._place), ns=(now - place, now - place))

    def counts(self) -> dict[str, int]:
        """damaged: files that were not whole, and were removed; refused: pages that the system would not write;
        given_up: files that made room."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Nothing is open."""

    def trim(self) -> None:
        """Give up the files that were not used for longest, until there is room for what writers bring until they look
        again. Files that nobody finished go too."""
        with self._lock:
            self._written = 0
        now, files, total = time.time(), [], 0
        for entry in _files(self._folder):
            with suppress(OSError):  # another engine has given it up
                facts = entry.stat(follow_symlinks=False)
                if entry.name.startswith("."):
                    if now - facts.st_mtime > _UNFINISHED_SECONDS:
                        os.unlink(entry.path)
                    continue
                files.append((facts.st_mtime_ns, facts.st_size, entry.path))
                total += facts.st_size
        room = self._size - self._size * _FREE // _SLACK
        if total <= room:
            return
        files.sort()
        for _, size, path in files:
            if total <= room:
                break
            try:
                os.unlink(path)
                self._count("given_up")
            except FileNotFoundError:
                pass
            except OSError as error:  # it stays
                self._refused("remove", error)
                break
            total -= size

    def _read(self, key: bytes, page: np.ndarray) -> bool:
        path = _file_of(self._folder, key, self._place)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            return self._refused("read", error)
        try:
            found = bytearray(FRAME_BYTES)
            whole = _fill(file, [memoryview(found), page.data]) and is_whole(found, key, self._place, page)
        except OSError as error:
            return self._refused("read", error)
        finally:
            os.close(file)
        if not whole:
            self._count("damaged")
            logger.warning("%s is not the page that its name says: it is removed", path)
            with suppress(OSError):
                os.unlink(path)
        return whole

    def _write(self, key: bytes, page: np.ndarray) -> bool:
        path = _file_of(self._folder, key, self._place)
        if os.path.exists(path):
            self.touch([key])
            return True
        if time.monotonic() < self._paused_until:
            self._count("refused")
            return False
        unfinished = os.path.join(self._folder, _unfinished())
        try:
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _drain(file, [memoryview(frame(key, self._place, page)), page.data])
                if self._fsync:
                    os.fsync(file)
            finally:
                os.close(file)
            try:
                os.rename(unfinished, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                os.rename(unfinished, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(unfinished)
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with self._lock:
                    self._written = self._size  # look whether there is something to give up
            return self._refused("write", error)
        with self._lock:
            self._written += FRAME_BYTES + page.size
        return True

    def _refused(self, what: str, error: OSError) -> bool:
        self._count("refused")
        logger.warning("the KV store in %s: cannot %s a page: %s", self._folder, what, error.strerror or error)
        return False

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _file_of(folder: str, key: bytes, place: Place) -> str:
    name = key.hex()
    return f"{folder}/{name[:2]}/{name}.{place}"


def _unfinished() -> str:
    return f".{os.getpid()}-{os.urandom(8).hex()}"


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    """All files below a folder. What goes while it is looked through is left out."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            else:
                yield entry


def _fill(file: int, parts: list[memoryview]) -> bool:
    """Read until all parts are full; False where the file is shorter, or longer."""
    wanted = sum(part.nbytes for part in parts)
    if os.fstat(file).st_size != wanted:
        return False
    done = 0
    while done < wanted:
        n = os.preadv(file, _behind(parts, done), done)
        if not n:
            return False
        done += n
    return True


def _drain(file: int, parts: list[memoryview]) -> None:
    """Write all parts."""
    wanted, done = sum(part.nbytes for part in parts), 0
    while done < wanted:
        done += os.writev(file, _behind(parts, done))


def _behind(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts after so many bytes."""
    left = []
    for part in parts:
        if done < part.nbytes:
            left.append(part[done:])
        done = max(0, done - part.nbytes)
    return left
