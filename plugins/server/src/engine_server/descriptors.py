"""Files that this process may have open: each connection is one."""

from __future__ import annotations

import contextlib
import logging

log = logging.getLogger("engine.server")

OTHER_FILES = 256
"""What is open beside connections, generously."""


def allow_connections(count: int) -> None:
    """Raise the soft limit on open files, as far as the hard one lets, so that `count` connections find room. Says so
    where they do not: what comes then waits in the system's queue until others have left."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    wanted = count + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft < wanted:
        log.warning(
            "this process may open %d files, %d are wanted for --max-connections %d: raise the limit (ulimit -n)",
            soft,
            wanted,
            count,
        )
