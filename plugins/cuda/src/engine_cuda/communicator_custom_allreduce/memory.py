"""Memory of each rank that all ranks of a machine see: a GPU's, by CUDA's handles for other processes, or the
processor's, where kernels are interpreted."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any, Protocol

from engine_cuda.communicator_custom_allreduce.layout import DATA, FLAGS, STATE

Exchange = Callable[[bytes], list[bytes]]
"""What each rank gives, by rank; every rank calls it."""

RELEASED = 0x7F
"""Every byte of a flag for which nobody waits: such a number is beyond all that are counted."""
_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_NON_BLOCKING = 1


class SharedMemory(Protocol):
    """Of one rank, with the others' in sight.

    Attributes:
        addresses: by rank, where its memory is mapped in this process.
    """

    addresses: list[int]

    def release(self) -> None:
        """Have every kernel of this rank that waits for others end, from another thread, while it runs."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...


class HostMemory:
    """The processor's, without a name (memfd): for interpreted kernels. Zeroed."""

    def __init__(self, nbytes: int, rank: int, exchange: Exchange) -> None:
        own = os.memfd_create("engine-allreduce")
        self._maps: list[mmap.mmap] = []
        try:
            os.ftruncate(own, nbytes)
            for place in exchange(f"/proc/{os.getpid()}/fd/{own}".encode()):
                other = os.open(place, os.O_RDWR)
                self._maps.append(mmap.mmap(other, nbytes))
                os.close(other)
            exchange(b"")  # nobody closes what another has yet to open
        finally:
            os.close(own)
        self._views = [ctypes.c_char.from_buffer(each) for each in self._maps]
        self.addresses = [ctypes.addressof(view) for view in self._views]
        self._rank = rank

    def release(self) -> None:
        if self.addresses:
            ctypes.memset(self.addresses[self._rank] + FLAGS, RELEASED, STATE - FLAGS)

    def close(self) -> None:
        self.addresses = []
        self._views = []
        for each in self._maps:
            each.close()
        self._maps = []


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


class DeviceMemory:
    """A GPU's, zeroed. By the CUDA driver's own functions: torch's allocator gives no whole allocations away.

    The device's context is the current one of the thread that builds it. Raises RuntimeError where the driver refuses,
    on every rank if on one.
    """

    def __init__(self, nbytes: int, rank: int, exchange: Exchange, library: Any = None) -> None:
        self._cuda = library or ctypes.CDLL("libcuda.so.1")
        self._rank = rank
        self._own = ctypes.c_uint64()
        self._others = list[ctypes.c_uint64]()
        self._context = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()
        self._released = ctypes.c_void_p()
        self.addresses: list[int] = []
        handle, trouble = _Handle(), ""
        try:
            self._call("cuCtxGetCurrent", ctypes.byref(self._context))
            self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))
            self._call("cuMemHostAlloc", ctypes.byref(self._released), ctypes.c_size_t(STATE - FLAGS), ctypes.c_uint(0))
            ctypes.memset(self._released, RELEASED, STATE - FLAGS)
            self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(nbytes))
            self._call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(DATA))
            self._call("cuCtxSynchronize")
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        except RuntimeError as error:
            trouble = str(error)
        handles = exchange(b"" if trouble else bytes(handle))
        if not trouble:
            trouble = self._open(handles)
        troubles = [f"rank {r}: {text.decode()}" for r, text in enumerate(exchange(trouble.encode())) if text]
        if troubles:
            self.close()
            raise RuntimeError("; ".join(troubles))

    def _open(self, handles: list[bytes]) -> str:
        """Map the others' memory; what is wrong, "" for nothing."""
        for rank, given in enumerate(handles):
            if not given:
                return f"rank {rank} has no memory to show"
            if rank == self._rank:
                self.addresses.append(int(self._own.value))
                continue
            mapped = ctypes.c_uint64()
            try:
                self._call(
                    "cuIpcOpenMemHandle_v2", ctypes.byref(mapped), _Handle.from_buffer_copy(given),
                    ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
                )  # fmt: skip
            except RuntimeError as error:
                return f"rank {rank}'s memory: {error}"
            self._others.append(mapped)
            self.addresses.append(int(mapped.value))
        return ""

    def release(self) -> None:
        if not self._own.value or not self._stream.value:
            return
        self._cuda.cuCtxSetCurrent(self._context)  # another thread's is none
        # A copy, which needs no processor of the GPU and no kernel that would have to be loaded beside those that wait.
        self._cuda.cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(self._own.value + FLAGS), self._released, ctypes.c_size_t(STATE - FLAGS), self._stream
        )

    def close(self) -> None:
        """Whatever the driver says to it: the process may be ending."""
        for mapped in self._others:
            self._cuda.cuIpcCloseMemHandle(mapped)
        if self._own.value:
            self._cuda.cuMemFree_v2(self._own)
        if self._stream.value:
            self._cuda.cuStreamDestroy_v2(self._stream)
        if self._released.value:
            self._cuda.cuMemFreeHost(self._released)
        self._others = []
        self._own = ctypes.c_uint64()
        self._stream = ctypes.c_void_p()
        self._released = ctypes.c_void_p()
        self.addresses = []

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error %d' % code).decode()}")
