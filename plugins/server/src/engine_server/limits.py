"""How much one API key may ask for: requests a minute, and requests at once."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from engine_server.errors import APIError

BUSY_RETRY_SECONDS = 1


@dataclass(frozen=True)
class KeyLimits:
    """Of one key; None: no limit.

    Args:
        requests_per_minute: at least 1. So many may come at once, too, after a minute without any.
        max_concurrent_requests: at least 1.
    """

    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    def __bool__(self) -> bool:
        return self.requests_per_minute is not None or self.max_concurrent_requests is not None


class KeyUsage(Protocol):
    """What a key has used, wherever it is counted: see `Usage`."""

    def enter(self) -> APIError | Awaitable[APIError | None] | None:
        """Count a request in; where it is one too many, a 429 APIError."""
        ...

    def hold(self) -> None:
        """A request that was counted in goes on beyond its answer: `leave` is called once more."""
        ...

    def leave(self) -> None:
        """A request that was counted in has ended."""
        ...


class Usage:
    """What a key has used: a token bucket (Turner, "New directions in communications", 1986) that holds a minute's
    requests and fills steadily, and the requests in progress.

    Args:
        limits: may be exchanged while requests are in progress.
        clock: seconds, never going back.
    """

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.active = 0
        self._clock, self._looked = clock, clock()
        self._left = float(limits.requests_per_minute or 0)

    def enter(self) -> APIError | None:
        """Count a request in; where it is one too many, a 429 APIError that says when to come back, and nothing is
        counted."""
        most = self.limits.max_concurrent_requests
        if most is not None and self.active >= most:
            return _refusal(
                f"{self.active} requests with this API key are in progress, and no more than {most} may be",
                BUSY_RETRY_SECONDS,
            )
        rate = self.limits.requests_per_minute
        if rate is not None:
            now = self._clock()
            self._left, self._looked = min(rate, self._left + (now - self._looked) * rate / 60), now
            if self._left < 1:
                wait = math.ceil((1 - self._left) * 60 / rate)
                return _refusal(f"this API key may send {rate} requests a minute", wait)
            self._left -= 1
        self.active += 1
        return None

    def hold(self) -> None:
        """A request that was counted in goes on beyond its answer: `leave` is called once more."""
        self.active += 1

    def leave(self) -> None:
        """A request that was counted in has ended."""
        self.active -= 1


def _refusal(why: str, seconds: int) -> APIError:
    return APIError(
        429, f"{why}; try again in {seconds} s", code="rate_limit_exceeded", headers={"Retry-After": str(seconds)}
    )
