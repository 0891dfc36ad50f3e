"""Programmatic dependent launch: a kernel begins while the one before it in the stream still runs, and waits by itself
for what that one writes (compute capability 9.0 and later).

A kernel that is launched so calls `gdc_wait` before it reads or writes what another may write or read: by then all
that was launched before it has ended. Every kernel may call `gdc_launch_dependents`, which lets the next one begin
once all its programs have done so or ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


def can_depend(device: torch.device) -> bool:
    """Whether a GPU launches dependents."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def depends(context: WorkerContext | None) -> bool:
    """Whether a driver's kernels are to be launched so: the platform `cuda` says it."""
    return bool(context is not None and getattr(context.platform, "dependents", False))
