"""NVIDIA's GPUs, asked of the driver's libraries: NVML, which starts nothing, and where it cannot say, the CUDA driver.

CUDA counts the fastest GPU first, NVML by place on the bus; where GPUs differ, or are divided (MIG), only the CUDA
driver knows what a process will see as number 0. Interfaces: NVIDIA's NVML and CUDA driver API references.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine_cuda.gpu import Gpu, Gpus, chosen

NVML = "libnvidia-ml.so.1"
CUDA = "libcuda.so.1"
_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_TEXT = 96
"""Bytes for a name: what both libraries ask for at most."""
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR."""
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""

Load = Callable[[str], Any]
"""Opens a shared library, as `ctypes.CDLL`; raises OSError."""


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def nvidia_gpus(environ: Mapping[str, str], load: Load = ctypes.CDLL) -> Gpus | None:
    """The GPUs of this machine that the environment leaves to a process; None where there is no driver."""
    found, sure = None, False
    try:
        found, sure = _Nvml(load(NVML)).gpus(environ)
        if sure:
            return found
        counted = _Driver(load(CUDA)).gpus(environ)
    except OSError:
        if found is not None:
            return found
        try:
            return _Driver(load(CUDA)).gpus(environ)
        except OSError:
            return None
    return found if counted.problem else replace(found, visible=counted.visible)


class _Library:
    """Calls that answer with a code, 0 for success."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> int:
        """The answer's code; -1 where this library has no such function."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return -1
        return int(function(*arguments))

    def text(self, name: str, *arguments: Any) -> str:
        """What a function writes into a buffer; "" where it fails."""
        buffer = ctypes.create_string_buffer(_TEXT)
        code = self.call(name, *arguments, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode(errors="replace") if code == 0 else ""

    def number(self, name: str, *arguments: Any) -> int:
        """What a function writes into an int; 0 where it fails."""
        value = ctypes.c_int()
        return value.value if self.call(name, *arguments, ctypes.byref(value)) == 0 else 0


class _Nvml(_Library):
    """NVIDIA's management library."""

    def gpus(self, environ: Mapping[str, str]) -> tuple[Gpus, bool]:
        """What it knows, and whether CUDA is certain to count the same way."""
        code = self.call("nvmlInit_v2")
        if code:
            return Gpus(maker="NVIDIA", problem=self._message(code)), True
        try:
            return self._gpus(environ)
        finally:
            self.call("nvmlShutdown")

    def _gpus(self, environ: Mapping[str, str]) -> tuple[Gpus, bool]:
        handles = []
        for index in range(self.number("nvmlDeviceGetCount_v2")):
            handle = ctypes.c_void_p()
            if self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)) == 0:
                handles.append(handle)
        identifiers = tuple(self.text("nvmlDeviceGetUUID", handle) for handle in handles)
        visible = environ.get(_VISIBLE)
        places = chosen(visible, identifiers)
        gpus = Gpus(
            maker="NVIDIA",
            visible=tuple(self._gpu(handles[place]) for place in places),
            installed=len(handles),
            hidden_by=f"{_VISIBLE}={visible}" if visible is not None and len(places) < len(handles) else "",
            driver=self.text("nvmlSystemGetDriverVersion"),
            serves=_version(self.number("nvmlSystemGetCudaDriverVersion_v2")),
        )
        by_name = visible is not None and visible.startswith("GPU-")
        alike = len({self.text("nvmlDeviceGetName", handle) for handle in handles}) <= 1
        ordered = alike or by_name or environ.get(_ORDER) == "PCI_BUS_ID"
        whole = "MIG-" not in (visible or "") and not any(self._divided(handles[place]) for place in places)
        known = all(gpu.total_bytes and gpu.capability is not None for gpu in gpus.visible)
        return gpus, ordered and whole and known

    def _gpu(self, handle: Any) -> Gpu:
        memory, major, minor = _MemoryInfo(), ctypes.c_int(), ctypes.c_int()
        has_memory = self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)) == 0
        versions = ctypes.byref(major), ctypes.byref(minor)
        has_capability = self.call("nvmlDeviceGetCudaComputeCapability", handle, *versions) == 0
        return Gpu(
            name=self.text("nvmlDeviceGetName", handle),
            total_bytes=memory.total if has_memory else 0,
            free_bytes=memory.free if has_memory else None,
            capability=(major.value, minor.value) if has_capability else None,
        )

    def _divided(self, handle: Any) -> bool:
        """Whether it is in MIG mode: a process then sees an instance of it."""
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        return (
            self.call("nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(pending)) == 0
            and mode.value == 1
        )

    def _message(self, code: int) -> str:
        try:
            function = self._library.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return (function(code) or b"").decode(errors="replace") or f"error {code}"


class _Driver(_Library):
    """The CUDA driver. It heeds CUDA_VISIBLE_DEVICES itself, of the process's own environment."""

    def gpus(self, environ: Mapping[str, str]) -> Gpus:
        code = self.call("cuInit", ctypes.c_uint(0))
        hidden = f"{_VISIBLE}={environ[_VISIBLE]}" if _VISIBLE in environ else ""
        if code == _NO_DEVICE:
            return Gpus(maker="NVIDIA", hidden_by=hidden)
        if code:
            return Gpus(maker="NVIDIA", problem=self._message(code))
        visible = tuple(self._gpu(number) for number in range(self.count("cuDeviceGetCount")))
        return Gpus(
            maker="NVIDIA",
            visible=visible,
            installed=len(visible),
            hidden_by="" if visible else hidden,
            serves=_version(self.count("cuDriverGetVersion")),
        )

    def count(self, name: str, *arguments: Any) -> int:
        """As `number`, of a function that takes the place for its answer first."""
        value = ctypes.c_int()
        return value.value if self.call(name, ctypes.byref(value), *arguments) == 0 else 0

    def _gpu(self, number: int) -> Gpu:
        device = ctypes.c_int(self.count("cuDeviceGet", ctypes.c_int(number)))
        name, total = ctypes.create_string_buffer(_TEXT), ctypes.c_size_t()
        self.call("cuDeviceGetName", name, ctypes.c_int(_TEXT), device)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        major, minor = (self.count("cuDeviceGetAttribute", ctypes.c_int(which), device) for which in (_MAJOR, _MINOR))
        return Gpu(name.value.decode(errors="replace"), total.value, capability=(major, minor) if major else None)

    def _message(self, code: int) -> str:
        message = ctypes.c_char_p()
        self.call("cuGetErrorString", ctypes.c_int(code), ctypes.byref(message))
        return (message.value or b"").decode(errors="replace") or f"error {code}"


def _version(number: int) -> tuple[int, int] | None:
    """13010 -> (13, 1), as both libraries write CUDA versions."""
    return (number // 1000, number % 1000 // 10) if number else None
