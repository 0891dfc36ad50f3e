"""Reasons why a driver that is NVIDIA's alone cannot serve here: for `Card.unsupported`, without torch."""

from __future__ import annotations

from pathlib import Path

NVIDIA, AMD = Path("/dev/nvidiactl"), Path("/dev/kfd")
"""What the makers' drivers put up where a process may use a GPU."""


def wrong_gpu(device: str) -> list[str]:
    """Why what runs on NVIDIA's GPUs alone cannot serve a torch device of kind "cuda". Empty for other kinds."""
    if device.partition(":")[0] != "cuda" or NVIDIA.exists():
        return []
    if AMD.exists():
        return ["it is for NVIDIA's GPUs, and the one that is here is AMD's"]
    return ["no GPU of NVIDIA's is found on this machine"]
