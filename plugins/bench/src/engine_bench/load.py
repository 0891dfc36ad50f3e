"""The open loop: requests are sent when they are planned, whatever became of those before them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from engine_bench.exchange import Exchange, Target, send

LEAD_SECONDS = 0.05
"""From the call to the first planned arrival."""


async def run_load(
    target: Target, requests: Sequence[bytes], arrivals: Sequence[float], timeout: float
) -> list[Exchange]:
    """Send each request at its arrival and wait for all answers.

    Args:
        requests: encoded.
        arrivals: seconds from the start, ascending, one a request.
        timeout: seconds that each request gets.

    Returns:
        One exchange a request, in order.
    """
    start = time.perf_counter() + LEAD_SECONDS
    exchanges = [Exchange(planned=start + arrival) for arrival in arrivals]
    async with asyncio.TaskGroup() as tasks:
        for request, exchange in zip(requests, exchanges, strict=True):
            delay = exchange.planned - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.create_task(send(target, request, exchange, timeout))
    return exchanges
