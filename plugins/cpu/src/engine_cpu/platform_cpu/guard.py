"""The guard of a recording: nothing may be computed but by native calls, which the tape sees."""

from __future__ import annotations

from typing import Any

import torch

from engine.types.errors import ContractError
from engine_cpu.platform_cpu.recorded_memory import RecordedMemory
from engine_kit.dispatch_guard import DispatchGuard

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
"""They compute nothing; where the memory lies is what the tape's calls know."""


class RecordingGuard(DispatchGuard):
    """While active, every tensor operation must be a view or an allocation of memory that nobody has filled.

    Attributes:
        memory: where that lies. A replay writes there, so it must live as long as the tape.

    Raises (from the offending line):
        ContractError: names the operation, the file, the line and the function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = RecordedMemory()

    def refuse(self, func: Any, line: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See the base."""
        if func in _ALLOCATIONS:
            return self.memory.place(func(*args, **kwargs))
        raise ContractError(
            "record a decode step as native calls",
            f"{func} at {line}, which a replay would leave out",
            "let a driver compute it that records its calls, or start with --platform.capture never",
            point="platform",
        )
