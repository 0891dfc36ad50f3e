"""The client of several engine cores in processes of their own, for callers who make the steps: `LLM`, `LLMEngine`."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.frontend.core_ranks import CoreRanks, RankNews
from engine.frontend.merged_stats import merge_ready
from engine.frontend.rank_calls import RankCalls
from engine.types.errors import EngineError
from engine.types.messages import Outputs, Reply
from engine.types.outputs import CoreOutputs, StepStats
from engine.types.request import EngineRequest
from engine.types.start import WorkerReady


class RanksClient:
    """See `engine.frontend.client.EngineClient`. The cores step by themselves; `receive` waits for what they tell.

    They end with this object, with the program, or with `shutdown`, whichever is first.

    Args:
        ranks: not yet waited for; shut down if they do not get ready.
    """

    def __init__(self, ranks: CoreRanks) -> None:
        self._ranks = ranks
        news: queue.SimpleQueue[RankNews] = queue.SimpleQueue()
        self._news = news
        self._early: list[CoreOutputs] = []
        self._num_calls = 0
        try:
            self._worker = merge_ready(ranks.wait_ready())
            ranks.listen(news.put)
        except BaseException:
            ranks.shutdown()
            raise
        self._finalizer = weakref.finalize(self, ranks.shutdown)

    @property
    def worker(self) -> WorkerReady:
        return self._worker

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._ranks.add(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._ranks.abort(request_ids)

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        if self._early:
            return self._early.pop(0)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            item = self._next(deadline)
            if item is None:
                return CoreOutputs(outputs=[])
            news = self._take(item)
            if news is not None and news.outputs:
                return news

    def has_work(self) -> bool:
        return bool(self._early) or self._ranks.num_sequences > 0

    def stats(self) -> StepStats:
        return msgspec.convert(self.call("stats"), StepStats)

    def call(self, method: str) -> Any:
        """Ask every core ("stats", "page_map", ...) and wait; answers merged as by `AsyncLLM`.

        Raises EngineError where one refuses, EngineDeadError where the last has died.
        """
        self._num_calls += 1
        asked = RankCalls(method, self._ranks.living)
        for rank in self._ranks.living:
            self._ranks.call(rank, self._num_calls, method)
        while not asked.complete:
            item = self._next(None)
            assert item is not None
            news = self._take(item)
            if news is not None:
                self._early.append(news)
            if isinstance(item.news, Reply):
                if item.news.call_id == self._num_calls:
                    asked.take(item.rank, item.news)
            elif item.rank not in self._ranks.living:
                asked.take(item.rank, None)
        return asked.result()

    def shutdown(self) -> None:
        self._finalizer()

    def _next(self, deadline: float | None) -> RankNews | None:
        """What came, or comes until then."""
        try:
            return self._news.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _take(self, item: RankNews) -> CoreOutputs | None:
        news = self._ranks.take(item)
        if isinstance(news, EngineError):
            raise news
        return news.outputs if isinstance(news, Outputs) else None
