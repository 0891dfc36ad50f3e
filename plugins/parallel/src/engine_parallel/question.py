"""A question to every engine core, and their answers as one."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import msgspec

from engine.types.errors import EngineError
from engine.types.outputs import StepStats
from engine_parallel.merged import merge_stats


class Question:
    """Collects answers. A core that dies before it has answered is left out.

    Args:
        method: of the core.
        dp_ranks: who is asked.

    Attributes:
        answer: statistics summed over the ranks, as plain data; lists (page maps, the answers of workers) as one; of
            other answers, which are all alike, the first. An EngineError where a core refuses, or none has answered.
    """

    def __init__(self, method: str, dp_ranks: Iterable[int]) -> None:
        self.answer: Future[Any] = Future()
        self._method = method
        self._waiting = set(dp_ranks)
        self._answers: dict[int, Future[Any]] = {}
        if not self._waiting:
            self._end(None)

    def take(self, dp_rank: int, answer: Future[Any]) -> None:
        """A core has answered."""
        if dp_rank in self._waiting:
            self._waiting.discard(dp_rank)
            self._answers[dp_rank] = answer
            if not self._waiting:
                self._end(None)

    def leave(self, dp_rank: int, death: EngineError | None = None) -> None:
        """A core has died; `death`: and with it the engine."""
        if dp_rank in self._waiting:
            self._waiting.discard(dp_rank)
            if not self._waiting:
                self._end(death)

    def _end(self, death: EngineError | None) -> None:
        if self.answer.done():  # whoever asked has given up
            return
        try:
            self.answer.set_result(self._result(death))
        except EngineError as error:
            self.answer.set_exception(error)

    def _result(self, death: EngineError | None) -> Any:
        several = [self._answers[dp_rank] for dp_rank in sorted(self._answers)]
        if not several:
            raise death or EngineError(
                f"call the engine cores: {self._method}", "those that were asked have died", "ask again"
            )
        for dp_rank, answer in sorted(self._answers.items()):
            if (error := answer.exception()) is not None:
                where = f" of data-parallel rank {dp_rank}" if len(several) > 1 else ""
                raise EngineError(f"call the engine core{where}", getattr(error, "found", str(error)))
        values = [answer.result() for answer in several]
        if self._method == "stats" and len(values) > 1:
            return msgspec.to_builtins(merge_stats([msgspec.convert(value, StepStats) for value in values]))
        if self._method == "page_maps" or self._method.startswith("worker."):  # of each core, or of each rank
            return [one for value in values for one in value]
        return values[0]
