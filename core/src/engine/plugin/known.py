"""Drivers that are known to exist, installed or not: what to install for them. Data alone; nothing is chosen by it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DISTRIBUTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "engine-cpu": {
            "platform": ("cpu",),
            "ops": ("cpu",),
            "attention": ("cpu",),
            "communicator": ("shm",),
            "quantization": ("int8", "int4"),
        },
        "engine-evictors": {"evictor": ("prefix",)},
        "engine-tiny": {"checkpoint": ("tiny",)},
        "engine-cuda": {
            "platform": ("cuda",),
            "ops": ("triton", "triton_gemv"),
            "attention": ("triton", "mla"),
            "communicator": ("pynccl", "custom_allreduce"),
            "quantization": ("fp8",),
        },
        "engine-tpu": {"platform": ("tpu",)},
        "engine-flashattn": {"attention": ("flash",)},
        "engine-flashinfer": {"attention": ("flashinfer",)},
        "engine-xgrammar": {"grammar": ("xgrammar",)},
        "engine-llguidance": {"grammar": ("llguidance",)},
        "engine-outlines": {"grammar": ("outlines",)},
    }
)
"""By distribution: point, and the names of its drivers there."""


def distribution_of(point: str, name: str) -> str:
    """The distribution that is known to offer this driver; "" for none."""
    return next((dist for dist, points in DISTRIBUTIONS.items() if name in points.get(point, ())), "")


def known_names(point: str) -> tuple[str, ...]:
    """The drivers of a point that are known."""
    return tuple(name for points in DISTRIBUTIONS.values() for name in points.get(point, ()))


def how_to_install(point: str) -> str:
    """A pip line for the drivers of a point, the first that is known and the others, e.g. "pip install engine-a (or
    engine-b)". The point has a known driver."""
    first, *others = [dist for dist, points in DISTRIBUTIONS.items() if point in points]
    return f"pip install {first}" + (f" (or {', '.join(others)})" if others else "")
