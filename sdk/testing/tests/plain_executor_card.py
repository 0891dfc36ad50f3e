"""The card of the plain executor."""

from __future__ import annotations

from engine.interfaces.executor import ExecutorCard


class PlainExecutor(ExecutorCard):
    """Runs all workers on the caller's thread."""

    body = "plain_executor:Plain"
