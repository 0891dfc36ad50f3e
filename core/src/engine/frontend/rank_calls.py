"""A question to every engine core, and their answers as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.frontend.merged_stats import merge_stats
from engine.types.errors import EngineError
from engine.types.messages import Reply
from engine.types.outputs import StepStats


class RankCalls:
    """Collects answers. A rank that dies before it has answered is left out.

    Args:
        method: of the core.
        ranks: who was asked.
    """

    def __init__(self, method: str, ranks: Iterable[int]) -> None:
        self._method = method
        self._waiting = set(ranks)
        self._replies: dict[int, Reply] = {}

    @property
    def complete(self) -> bool:
        """Nobody is waited for any more."""
        return not self._waiting

    def take(self, rank: int, reply: Reply | None) -> None:
        """A rank's answer; None where it has died."""
        if rank in self._waiting:
            self._waiting.discard(rank)
            if reply is not None:
                self._replies[rank] = reply

    def result(self) -> Any:
        """Statistics summed over the ranks, as plain data; of page maps a list, by rank; the files of profiles as one
        list; of other answers, which are all alike, the first.

        Raises EngineError where a rank refused, or none has answered.
        """
        replies = [self._replies[rank] for rank in sorted(self._replies)]
        if not replies:
            raise EngineError(f"call the engine cores: {self._method}", "those that were asked have died", "ask again")
        for rank, reply in sorted(self._replies.items()):
            if reply.error:
                where = f" of data-parallel rank {rank}" if len(replies) > 1 else ""
                raise EngineError(f"call the engine core{where}", reply.error)
        if self._method == "stats" and len(replies) > 1:
            merged = merge_stats([msgspec.convert(reply.value, StepStats) for reply in replies])
            return msgspec.to_builtins(merged)
        if self._method == "page_map":
            return [reply.value for reply in replies]
        if self._method == "stop_profile":
            return [path for reply in replies for path in reply.value]
        return replies[0].value
