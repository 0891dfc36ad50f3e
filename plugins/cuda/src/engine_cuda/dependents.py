"""Programmatic dependent launch: a kernel begins while the one before it in the stream still runs, and waits by itself
for what that one writes (compute capability 9.0 and later).

A kernel that is launched so waits (`ops_triton.launching.start_dependent`) before it reads or writes what another may
write or read: by then all that was launched before it has ended. It also lets the next one begin, once all its programs
have said so or ended. What comes from no kernel, weights, it may read before: whoever
writes weights synchronises afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

DEPENDENT: Mapping[str, bool] = MappingProxyType({"launch_pdl": True})
"""What Triton takes at such a launch."""


def can_depend(device: torch.device) -> bool:
    """Whether a GPU launches dependents."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def depends(context: WorkerContext | None) -> Mapping[str, bool]:
    """What a driver's kernels are launched with, DEPENDENT or nothing: the platform `cuda` says it."""
    platform = getattr(context, "platform", None)
    return DEPENDENT if getattr(platform, "dependents", False) else {}


class MayDepend:
    """Base of what launches kernels that may be dependents.

    Attributes:
        dependent: DEPENDENT where they are, else nothing.
    """

    dependent: Mapping[str, bool] = MappingProxyType({})
