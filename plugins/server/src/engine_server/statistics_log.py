"""One line of statistics every few seconds while there is work, and silence while there is none."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from engine.embedding import INTERVAL, Interval, Observed


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
        self._llm, self._interval = llm, Interval(llm, clock)
        self._write = _print if write is None else write

    async def run(self, interval: float = INTERVAL) -> None:
        """Look every `interval` seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(interval)
            line = self.line()
            if line is not None:
                self._write(line)

    def line(self) -> str | None:
        """What happened since the last call (or since this object was made); None where there was nothing to do."""
        known, unfinished, stats = self._llm.last_stats is not None, self._llm.num_unfinished, self._interval.look()
        if not known:
            return f"running 0, waiting {unfinished}" if unfinished else None
        if not unfinished and not stats.prompt_tokens and not stats.generation_tokens:
            return None
        parts = [
            f"running {stats.num_running}",
            f"waiting {stats.num_waiting}",
            f"prompt {stats.prompt_tokens_per_second:,.1f} tokens/s",
            f"generation {stats.generation_tokens_per_second:,.1f} tokens/s",
            f"KV cache {_percent(stats.pages_used, stats.pages_total)}",
        ]
        if stats.prefix_queries:
            parts.append(f"prefix hits {_percent(stats.prefix_hits, stats.prefix_queries)}")
        if stats.num_drafts:
            parts.append(f"drafts accepted {_percent(stats.num_accepted_drafts, stats.num_drafts)}")
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
