"""The card of executor `inline`."""

from __future__ import annotations

from engine.interfaces.executor import ExecutorCard, ExecutorNeed


class InlineExecutor(ExecutorCard):
    """Runs one worker on the caller's thread: no other process, nothing to encode."""

    body = "engine_reference.executor_inline.body:Inline"

    @classmethod
    def unsupported(cls, need: ExecutorNeed) -> list[str]:
        """One worker is all it can start."""
        if need.world_size != 1:
            return [f"it runs one worker, {need.world_size} are needed"]
        return []
