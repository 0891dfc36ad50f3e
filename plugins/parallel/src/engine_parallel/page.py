"""A page of memory on which engine cores of one machine tell each other what they compute next.

Each has a place of its own that nobody else writes: eight bytes, which processors store and load whole, the number of
the step and, below it, what is told of it. So who finds everybody's number of a step knows that all of them are of that
step, without a lock. There are two sheets, for steps of even and odd numbers: who is ahead is ahead by one step, and
may not write over what others still read.

Who waits sleeps in the kernel on a word of the page (a futex), and the last to tell wakes all at once, by one call.
Nobody is asked to count, so two may find themselves the last, and wake twice, or in theory, where a processor delays a
store, none: sleepers look again after `LOOK_SECONDS` in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys

from engine.types.errors import ConfigError

LOOK_SECONDS = 0.05
NUMBER_BITS = 26
"""Of what is told of a step. The others of the 63 count steps: four years at a millisecond each."""

_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""The number of Linux's call `futex`, which libraries do not wrap."""
_WAIT = 0
_WAKE = 1
_HEAD = 64
"""Bytes before the first sheet: words of four, of which the first says how often sleepers were woken, the second who
has left."""
BOOT = "/proc/sys/kernel/random/boot_id"


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LOOK = _TimeSpec(0, round(LOOK_SECONDS * 1e9))


def machine() -> str:
    """What names the running system, and no other one: its memory is what processes can share, and only its own
    sleepers are woken. "" where the system does not say."""
    with contextlib.suppress(OSError), open(BOOT) as boot:
        return boot.read().strip()
    return ""


class Page:
    """A file that is mapped by all.

    Args:
        path: of the file. rank, size: whose place is written, and how many there are.
        make: the file, too, which is not there yet.

    Attributes:
        identity: device and inode of the file. Who finds the same on the same machine maps the same memory, whatever
            the path is called in its container; through another mount of a file system of the network it may not.

    Raises OSError where there is no such file, or it cannot be made; ConfigError where the system has no futex.
    """

    def __init__(self, path: str, rank: int, size: int, make: bool = False) -> None:
        call = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
        if call is None:
            raise ConfigError(
                "let engine cores step together",
                f"they wait for each other by a call of Linux, and this is {sys.platform} on {platform.machine()}",
                "leave --enable-expert-parallel out, or use one engine core",
            )
        self._path = path if make else ""
        length = _HEAD + 2 * 8 * size
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
        try:
            if make:
                os.truncate(file, length)
            elif os.fstat(file).st_size != length:
                raise OSError(f"{path} is not of {size} engine cores")
            found = os.fstat(file)
            self.identity = [found.st_dev, found.st_ino]
            self._map = mmap.mmap(file, length)
        finally:
            os.close(file)
        whole = memoryview(self._map)
        sheets = whole[_HEAD:].cast("q")
        self._words = whole[:_HEAD].cast("I")
        self._sheets = (sheets[:size], sheets[size:])
        self._rank = rank
        self._futex = ctypes.CDLL(None).syscall
        self._futex.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
        self._call = call
        self._word = ctypes.c_void_p(ctypes.addressof(ctypes.c_uint.from_buffer(self._map)))

    def tell(self, step: int, number: int) -> None:
        """Of a step, counted from 1."""
        self._sheets[step & 1][self._rank] = step << NUMBER_BITS | number

    def begun(self, step: int) -> bool:
        """Whether somebody has told of it."""
        return max(self._sheets[step & 1].tolist()) >> NUMBER_BITS >= step

    def late(self, step: int) -> list[int]:
        """The ranks that have not."""
        return [rank for rank, told in enumerate(self._sheets[step & 1].tolist()) if told >> NUMBER_BITS < step]

    def numbers(self, step: int) -> list[int] | None:
        """What all have told, by rank; None while somebody has not. Who finds them first wakes the others."""
        told = self._sheets[step & 1].tolist()
        if min(told) >> NUMBER_BITS < step:
            return None
        if self._words[0] != step & 0xFFFFFFFF:
            self._words[0] = step & 0xFFFFFFFF
            self._futex(self._call, self._word, _WAKE, 0x7FFFFFFF, None)
        return [number - (step << NUMBER_BITS) for number in told]

    def wait(self, step: int) -> list[int] | None:
        """`numbers`, waited for; None where they are not there after `LOOK_SECONDS`, or all were woken before."""
        seen = self._words[0]
        if (found := self.numbers(step)) is None:
            self._futex(self._call, self._word, _WAIT, seen, ctypes.byref(_LOOK))
            found = self.numbers(step)
        return found

    # -- leaving -------------------------------------------------------------------------------------------------------
    @property
    def left(self) -> int | None:
        """Who has left first, as far as anybody knows."""
        return self._words[1] - 1 if self._words[1] else None

    def leave(self, rank: int) -> None:
        """One has left: say so, and wake all to look. Who was said to have left first stays that."""
        self._words[1] = self._words[1] or rank + 1
        self._words[0] ^= 1 << 31
        self._futex(self._call, self._word, _WAKE, 0x7FFFFFFF, None)

    def forget(self, rank: int) -> None:
        """What one told that has left while others are still waited for, and may be started again."""
        for sheet in self._sheets:
            sheet[rank] = 0
        if self.left == rank:
            self._words[1] = 0

    def close(self) -> None:
        """Remove the file, where it was made here. The memory goes with the process: others may still be woken."""
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = ""
