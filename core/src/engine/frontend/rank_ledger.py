"""Which engine core has which sequence, and what each of them has to do."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from engine.frontend.merged_stats import merge_stats, stopped
from engine.interfaces.router import RankLoad, Router
from engine.types.errors import ContractError, EngineDeadError
from engine.types.outputs import CoreOutputs, StepStats
from engine.types.request import EngineRequest


class RankLedger:
    """The frontend's book of several engine cores. One thread at a time; it talks to nobody.

    What waits at a rank is counted here, not there: everything that was sent and has not ended, less what the rank
    says is running. So a burst is spread evenly although no rank has told of it yet.

    Args:
        num_ranks: they all live.
        router: chooses; None for one rank.
    """

    def __init__(self, num_ranks: int, router: Router | None = None) -> None:
        assert router is not None or num_ranks == 1
        self._router = router
        self._rank_of: dict[str, int] = {}
        self._unfinished: list[dict[str, None]] = [{} for _ in range(num_ranks)]
        self._stats: list[StepStats | None] = [None] * num_ranks
        self._before: list[StepStats | None] = [None] * num_ranks  # of those that stood in its place and died
        self._living = list(range(num_ranks))
        self._others = [0] * num_ranks

    def others(self, rank: int) -> int:
        """Sequences of other clients at a rank."""
        return self._others[rank]

    @property
    def num_others(self) -> int:
        """Sequences of other clients, as the ranks told last."""
        return sum(self._others)

    @property
    def num_ranks(self) -> int:
        """All, dead ones too."""
        return len(self._unfinished)

    @property
    def living(self) -> Sequence[int]:
        """The ranks that live, in order."""
        return tuple(self._living)

    def lives(self, rank: int) -> bool:
        """Whether this one does."""
        return rank in self._living

    @property
    def num_sequences(self) -> int:
        """Sent and not ended."""
        return len(self._rank_of)

    def stats(self, rank: int) -> StepStats | None:
        """What a rank told last; None where it has told nothing. Of a dead one its counters."""
        return self._stats[rank]

    def merged(self) -> StepStats | None:
        """All ranks as one."""
        return merge_stats([stats for stats in self._stats if stats is not None])

    def load(self, rank: int) -> RankLoad:
        """What is known of a rank."""
        stats, unfinished = self._stats[rank], len(self._unfinished[rank]) + self._others[rank]
        if stats is None:
            return RankLoad(rank, 0, unfinished, 0.0)
        running = min(stats.num_running, unfinished)
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        return RankLoad(rank, running, unfinished - running, usage)

    def place(self, requests: Sequence[EngineRequest]) -> int:
        """Choose the rank that takes these requests, and enter them in the book.

        Raises:
            EngineDeadError: no rank lives.
            ContractError: the router raised, or named a rank that was not offered.
        """
        if not self._living:
            raise EngineDeadError("send a request", "no engine core lives", "start the engine again")
        rank = self._living[0] if len(self._living) == 1 else self._route(requests)
        unfinished = self._unfinished[rank]
        for request in requests:
            unfinished[request.request_id] = None
            self._rank_of[request.request_id] = rank
        return rank

    def _route(self, requests: Sequence[EngineRequest]) -> int:
        assert self._router is not None
        loads = [self.load(rank) for rank in self._living]
        try:
            rank = self._router.route(requests, loads)
        except Exception as error:
            found = f"the router raised {type(error).__name__}: {error}"
            raise ContractError("choose an engine core", found, point="router") from error
        if type(rank) is not int or rank not in self._living:
            found = f"the router named {rank!r}, living are {', '.join(map(str, self._living))}"
            raise ContractError("choose an engine core", found, point="router")
        return rank

    def forget(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """These sequences end by the user's will; unknown ids are passed over. Returns them by rank."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            rank = self._rank_of.pop(request_id, None)
            if rank is not None:
                del self._unfinished[rank][request_id]
                by_rank.setdefault(rank, []).append(request_id)
        return by_rank

    def told(self, rank: int, news: CoreOutputs, others: int = 0) -> None:
        """A living rank's news; `others`: sequences that other clients have there, told with the statistics."""
        if news.stats is not None:
            self._others[rank] = others
            before = self._before[rank]
            self._stats[rank] = news.stats if before is None else merge_stats([before, news.stats])
        for output in news.outputs:
            # A sequence that was sent to another rank since is none of this one's affair.
            if output.finish_reason is not None and self._rank_of.get(output.request_id) == rank:
                del self._rank_of[output.request_id], self._unfinished[rank][output.request_id]

    def bury(self, rank: int) -> list[str]:
        """A rank has died. Returns the sequences that are lost with it, in the order in which they were sent."""
        self._living.remove(rank)
        self._others[rank] = 0
        if (stats := self._stats[rank]) is not None:
            self._stats[rank] = stopped(stats)
        lost, self._unfinished[rank] = list(self._unfinished[rank]), {}
        for request_id in lost:
            del self._rank_of[request_id]
        if self._router is not None:
            self._router.rank_died(rank)
        return lost

    def revive(self, rank: int) -> None:
        """Another core, which knows nothing yet, stands in the place of one that died; its counters go on."""
        self._before[rank] = self._stats[rank]
        bisect.insort(self._living, rank)

    def cache_reset(self) -> None:
        """The ranks were asked to forget their prefix caches."""
        if self._router is not None:
            self._router.cache_reset()
