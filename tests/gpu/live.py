"""A plugin of pytest: a failure is told when it happens, and a process whose GPU fails ends.

An access to memory that is not there spoils a process's GPU for good: every test behind it would fail for nothing.
"""

from __future__ import annotations

import os
import sys

import pytest

SPOILED = 77
"""The exit status of a process whose GPU failed; pytest-xdist names the test, and starts another."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With pytest-xdist this runs in the process that prints, for each report of the others."""
    if report.failed:
        print(f"\nLIVE FAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After a test marked gpu: whether the GPU still works."""
    torch = sys.modules.get("torch")
    if torch is None or item.get_closest_marker("gpu") is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"LIVE FAILED {item.nodeid}: the GPU of this process is spoiled: {error}", file=sys.stderr, flush=True)
        if os.environ.get("PYTEST_XDIST_WORKER"):
            os._exit(SPOILED)
        pytest.exit(f"{item.nodeid} has spoiled this process's GPU: {error}", returncode=SPOILED)
