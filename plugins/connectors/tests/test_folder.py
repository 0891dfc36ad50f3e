"""A folder of pages: what is found in it is whole, whoever wrote it, and it stays within its bound."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from memory_store import Request, core_context

from engine.types.errors import ConfigError
from engine.types.parallel import Parallel
from engine_connectors.file import folder as module
from engine_connectors.file.folder import FolderDirectory, FolderStore, folder_of
from engine_connectors.pages import FRAME_BYTES, Place, page_key, places_of
from engine_connectors.store_scheduler import StoreScheduler

FIRST = Place()
PAGE_BYTES = 1000
FILE_BYTES = PAGE_BYTES + FRAME_BYTES
KEYS = [page_key(b"identity", 0, bytes([number])) for number in range(40)]


def page(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, np.uint8)


def store(path: Path, size: int = 1 << 30, place: Place = FIRST) -> FolderStore:
    return FolderStore(folder_of(str(path)), place, size, fsync=False)


def found(one: FolderStore, number: int) -> bool:
    """Whether the page is found; then it is the right one."""
    into = np.zeros(PAGE_BYTES, np.uint8)
    (there,) = one.get([KEYS[number]], [into])
    assert not there or np.array_equal(into, page(number))
    return there


def file_of(path: Path, number: int) -> Path:
    (file,) = path.rglob(f"{KEYS[number].hex()}.*")
    return file


def test_pages_outlive_who_wrote_them(tmp_path: Path) -> None:
    assert store(tmp_path).put(KEYS[:3], [page(0), page(1), page(2)]) == [True] * 3
    again = store(tmp_path)
    assert [found(again, number) for number in range(4)] == [True, True, True, False]
    assert list(FolderDirectory(folder_of(str(tmp_path)), [Place()]).has(KEYS[:4])) == [True, True, True, False]
    assert not any(again.counts().values())


def test_every_rank_has_its_own(tmp_path: Path) -> None:
    first, second = store(tmp_path), store(tmp_path, place=Place(1, 0))
    directory = FolderDirectory(folder_of(str(tmp_path)), [Place(), Place(1, 0)])
    first.put(KEYS[:1], [page(0)])
    assert found(first, 0) and not found(second, 0)
    assert list(directory.has(KEYS[:1])) == [False], "a page is there when all ranks have theirs"
    second.put(KEYS[:1], [page(0)])
    assert list(directory.has(KEYS[:1])) == [True]


def cut(file: Path) -> None:
    os.truncate(file, FILE_BYTES - 1)


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[FRAME_BYTES + 700] ^= 1
    file.write_bytes(content)


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def foreign(file: Path) -> None:
    file.write_bytes(os.urandom(FILE_BYTES))


def renamed(file: Path) -> None:
    """Another page's file under this name: whole, but not this page."""
    other = page_key(b"another", 0, b"block")
    store(file.parents[2]).put([other], [page(7)])
    os.replace(file_of_key(file.parents[2], other), file)


def file_of_key(path: Path, key: bytes) -> Path:
    return next(path.rglob(f"{key.hex()}.*"))


@pytest.mark.parametrize("damage", [cut, flipped, longer, empty, foreign, renamed])
def test_damaged_files_are_counted_and_removed(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    one = store(tmp_path)
    one.put(KEYS[:2], [page(0), page(1)])
    damage(file_of(tmp_path, 0))
    assert not found(one, 0) and found(one, 1)
    assert one.counts()["damaged"] == 1 and not list(tmp_path.rglob(f"{KEYS[0].hex()}.*"))
    assert one.put(KEYS[:1], [page(0)]) == [True] and found(one, 0), "it is computed and kept again"


def test_pages_of_another_size_are_not_taken(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.put(KEYS[:1], [page(0)])
    assert one.get(KEYS[:1], [np.zeros(PAGE_BYTES - 8, np.uint8)]) == [False]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    """Across two engines that share the folder, one of which came later."""
    size = 32 * FILE_BYTES
    first, second = store(tmp_path, size), store(tmp_path, size)
    for number in range(16):
        first.put([KEYS[number]], [page(number)])
    second.touch([KEYS[3], KEYS[2]])  # 2 is older than 3
    for number in range(16, 40):
        second.put([KEYS[number]], [page(number)])
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= size
    assert found(first, 3) and found(first, 39) and not found(first, 0)
    assert second.counts()["given_up"] >= 8
    assert len([number for number in range(40) if found(first, number)]) >= 28


def test_files_of_engines_that_died_writing_go(tmp_path: Path) -> None:
    one = store(tmp_path)
    folder = folder_of(str(tmp_path))
    old, young = folder / ".1-old", folder / ".1-young"
    for file in (old, young):
        file.write_bytes(b"half a page")
    os.utime(old, (1, 1))
    one.trim()
    assert young.exists() and not old.exists()


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path) -> None:
    mine = tmp_path / "holiday.jpg"
    mine.write_bytes(bytes(10 * FILE_BYTES))
    one = store(tmp_path, 4 * FILE_BYTES)
    for number in range(12):
        one.put([KEYS[number]], [page(number)])
    assert mine.stat().st_size == 10 * FILE_BYTES


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written is not kept, nothing half written stays, and the system is left alone for a while."""
    one, calls = store(tmp_path), []

    def full(file: int, parts: list[memoryview]) -> int:
        calls.append(file)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one.put(KEYS[:1], [page(0)])
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "writev", full)
        assert one.put(KEYS[1:3], [page(1), page(2)]) == [False, False] and len(calls) == 1
    assert found(one, 0) and not found(one, 1) and one.counts()["refused"] == 2
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 1
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    later = store(tmp_path)
    assert later.put(KEYS[1:2], [page(1)]) == [True] and found(one, 1)


def test_files_that_cannot_be_removed_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are kept all the same, and nothing is raised."""

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    one = FolderStore(folder_of(str(tmp_path)), FIRST, 10 * FILE_BYTES, False)
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "unlink", refuse)
        for number in range(20):
            assert one.put([KEYS[number]], [page(number)]) == [True]
    assert one.counts()["given_up"] == 0 and one.counts()["refused"] > 0


def test_writes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes and reads a few bytes at a time gets everything all the same."""
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(module.os, "writev", lambda file, parts: writev(file, [parts[0][:70]]))
    monkeypatch.setattr(module.os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:70]], at))
    one = store(tmp_path)
    one.put(KEYS[:1], [page(0)])
    assert found(one, 0)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"keep pages in .*file.*--kv-connector.path"):
        folder_of(str(tmp_path / "file"))


def test_a_folder_that_is_lost_is_a_miss(tmp_path: Path) -> None:
    one = store(tmp_path / "a")
    one.put(KEYS[:1], [page(0)])
    (tmp_path / "a").rename(tmp_path / "b")
    assert not found(one, 0)
    assert one.put(KEYS[1:2], [page(1)]) == [False] and one.counts()["refused"] == 1


def test_engines_that_write_one_page_at_once(tmp_path: Path) -> None:
    """Readers see it whole or not at all."""
    start, wrong = threading.Barrier(5), []

    def write() -> None:
        one = store(tmp_path)
        start.wait()
        for number in range(40):
            one.put([KEYS[number]], [page(number)])

    def read() -> None:
        one = store(tmp_path)
        start.wait()
        for number in range(40):
            found(one, number)
        wrong.append(one.counts()["damaged"])

    threads = [threading.Thread(target=job) for job in (write, write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]
    assert all(found(store(tmp_path), number) for number in range(40))


def test_stages_that_cache_nothing_keep_empty_pages(tmp_path: Path) -> None:
    one, nothing = store(tmp_path), np.zeros(0, np.uint8)
    assert one.put(KEYS[:1], [nothing]) == [True] and one.get(KEYS[:1], [nothing]) == [True]


def test_a_prompt_that_nobody_has_sent_costs_one_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    exists = os.path.exists

    def counting(path: str) -> bool:
        asked.append(path)
        return exists(path)

    places = places_of(Parallel(tp=2))
    core = StoreScheduler(core_context(None), FolderDirectory(folder_of(str(tmp_path)), places), waits=False)
    monkeypatch.setattr(os.path, "exists", counting)
    assert core.lookup(Request("a", 4096), 0) is None
    assert len(asked) == 1
