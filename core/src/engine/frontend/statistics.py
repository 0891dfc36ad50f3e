"""One line of statistics every few seconds while there is work, and silence while there is none."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Protocol

from engine.types.outputs import StepStats

INTERVAL = 10.0
"""Seconds between two lines."""


class Observed(Protocol):
    """What is watched: `AsyncLLM`, or what looks like it."""

    @property
    def last_stats(self) -> StepStats | None: ...

    @property
    def num_unfinished(self) -> int: ...


class StatisticsLog:
    """Prints how the engine does while it is busy.

        task = asyncio.create_task(StatisticsLog(llm).run())

    Args:
        llm: the engine that is watched.
        write: takes a line; None prints it to standard error.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        llm: Observed,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._llm, self._clock = llm, clock
        self._write = _print if write is None else write
        self._since, self._before = clock(), llm.last_stats

    async def run(self, interval: float = INTERVAL) -> None:
        """Look every `interval` seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(interval)
            line = self.line()
            if line is not None:
                self._write(line)

    def line(self) -> str | None:
        """What happened since the last call (or since this object was made); None where there was nothing to do."""
        now, stats, before = self._clock(), self._llm.last_stats, self._before
        seconds, self._since, self._before = max(now - self._since, 1e-9), now, stats
        unfinished = self._llm.num_unfinished
        if stats is None:
            return f"running 0, waiting {unfinished}" if unfinished else None
        prompt = stats.prompt_tokens - (before.prompt_tokens if before else 0)
        generation = stats.generation_tokens - (before.generation_tokens if before else 0)
        if not unfinished and not prompt and not generation:
            return None
        queries = stats.prefix_queries - (before.prefix_queries if before else 0)
        hits = stats.prefix_hits - (before.prefix_hits if before else 0)
        # Requests that the core has not told of yet are waiting for it.
        waiting = stats.num_waiting if stats.num_running or stats.num_waiting else unfinished
        parts = [
            f"running {stats.num_running}",
            f"waiting {waiting}",
            f"prompt {prompt / seconds:,.1f} tokens/s",
            f"generation {generation / seconds:,.1f} tokens/s",
            f"KV cache {_percent(stats.pages_used, stats.pages_total)}",
        ]
        if queries:
            parts.append(f"prefix hits {_percent(hits, queries)}")
        drafts = stats.num_drafts - (before.num_drafts if before else 0)
        if drafts:
            accepted = stats.num_accepted_drafts - (before.num_accepted_drafts if before else 0)
            parts.append(f"drafts accepted {_percent(accepted, drafts)}")
        if stats.num_preemptions:
            parts.append(f"preempted {stats.num_preemptions}")
        if stats.num_swap_preemptions:
            parts.append(f"of these swapped {stats.num_swap_preemptions}")
            parts.append(f"swapped now {stats.num_swapped}")
            parts.append(f"swap space {_percent(stats.swap_pages_used, stats.swap_pages_total)}")
        return ", ".join(parts)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def _print(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)
