"""What executors do alike: call a worker by name; of several workers' answers make one result of a step, and one answer
to the start. `engine.interfaces.executor.rank_starts` makes the start message of each."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.plugin.hints import did_you_mean
from engine.types.errors import ConfigError, ContractError
from engine.types.parallel import Place
from engine.types.plan import StepResult
from engine.types.start import WorkerReady

if TYPE_CHECKING:
    from engine.plugin.hooks import FailureCounts


def call_worker(worker: object, method: str, args: Sequence[Any] = ()) -> Any:
    """Call a worker's method, as `Executor.call` does on each.

    Raises ConfigError where it has none of this name, and what the method raises.
    """
    function = getattr(worker, method, None)
    if not callable(function):
        has = [name for name in dir(type(worker)) if not name.startswith("_")]
        raise ConfigError(
            f"call 'worker.{method}'",
            f"this platform's worker has no such method ({type(worker).__name__})",
            did_you_mean(method, has) or f"its methods are: {', '.join(has)}",
        )
    return function(*args)


def merge_ready(answers: Sequence[WorkerReady]) -> WorkerReady:
    """What the ranks of one engine core answer as one answer: see `WorkerReady`."""
    step_bytes = [answer.step_bytes for answer in answers if answer.step_bytes is not None]
    reasons = [reason for answer in answers for reason in answer.not_captured or ()]
    return WorkerReady(
        num_pages=min(answer.num_pages for answer in answers),
        weight_bytes=sum(answer.weight_bytes for answer in answers),
        cache_bytes=sum(answer.cache_bytes for answer in answers),
        num_parameters=sum(answer.num_parameters for answer in answers),
        load_seconds=max(answer.load_seconds for answer in answers),
        step_bytes=sum(step_bytes) if len(step_bytes) == len(answers) else None,
        captured=min((answer.captured for answer in answers), key=len),
        not_captured=tuple(dict.fromkeys(reasons)) if answers[0].not_captured is not None else None,
        broken=tuple(dict.fromkeys(plugin for answer in answers for plugin in answer.broken)),
        hook_failures=sum_failures(answer.hook_failures for answer in answers),
    )


def sum_failures(several: Iterable[FailureCounts]) -> FailureCounts:
    """The counts of several processes as one."""
    return sum_named(several)


def sum_named(several: Iterable[Iterable[tuple[Any, ...]]]) -> tuple[Any, ...]:
    """Counts, each behind the words that name it, of several processes as one."""
    total: Counter[tuple[str, ...]] = Counter()
    for told in several:
        for *names, count in told:
            total[tuple(names)] += count
    return tuple((*names, count) for names, count in total.items())


class RankAnswer(msgspec.Struct, kw_only=True):
    """What a rank says of a step to whoever merges the answers.

    Args:
        step_id: of the plan.
        checksum: CRC-32 of the tokens that it drew; None: it draws nothing.
        result: of the first rank that draws; None of all others.
        news: as in the result, of this rank.
    """

    step_id: int
    checksum: int | None = None
    result: StepResult | None = None
    news: dict[str, list[bytes]] | None = None

    @classmethod
    def of(cls, place: Place, result: StepResult) -> RankAnswer:
        """What the worker at a place gave."""
        if not place.draws:
            return cls(step_id=result.step_id, news=result.news)
        return cls(
            step_id=result.step_id,
            checksum=zlib.crc32(result.tokens.tobytes()),
            result=result if place.tp_rank == place.cp_rank == 0 else None,
            news=result.news,
        )


class StepMerge:
    """One step's result, made of all ranks' answers.

    Ranks of the last stage draw each for itself, from logits that are equal bit by bit and with random numbers that
    depend on nothing but the request: drawn tokens stand in every rank's table for the next step without another
    exchange, and the checksum proves it. The other stages draw nothing; the next plan brings them the tokens.

    Args:
        step_id: of the plan.
        ranks: all that answer.
    """

    def __init__(self, step_id: int, ranks: Iterable[int]) -> None:
        self._step_id = step_id
        self._waiting = set(ranks)
        self._checksums: set[int] = set()
        self._result: StepResult | None = None
        self._news: dict[str, list[bytes]] = {}

    @property
    def complete(self) -> bool:
        """Every rank has answered."""
        return not self._waiting

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not answered."""
        return sorted(self._waiting)

    def take(self, rank: int, answer: RankAnswer) -> None:
        """A rank's answer.

        Raises ContractError where it drew other tokens than a rank before it, or all have answered and none with a
        result.
        """
        self._waiting.discard(rank)
        if answer.checksum is not None:
            self._checksums.add(answer.checksum)
        for name, news in (answer.news or {}).items():
            self._news.setdefault(name, []).extend(news)
        if answer.result is not None:
            self._result = answer.result
        if len(self._checksums) > 1:
            found = f"rank {rank} drew other tokens than the ranks that answered before it"
            remedy = "ranks must compute alike: use equal devices, and the same versions of every distribution"
        elif self.complete and self._result is None:
            found, remedy = "no rank answered with a result", "choose another executor and tell its author"
        else:
            return
        raise ContractError(f"compute step {self._step_id}", found, remedy, point="executor")

    def result(self) -> StepResult:
        """The step's result, once it is complete, with the news of all ranks."""
        assert self._result is not None and self.complete
        return msgspec.structs.replace(self._result, news=self._news) if self._news else self._result
