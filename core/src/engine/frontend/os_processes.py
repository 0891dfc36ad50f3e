"""A core's processes as the operating system sees them: what they cannot say themselves."""

from __future__ import annotations

import contextlib

import psutil

_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})


class OSProcesses:
    """A process that is ready, and those that it has started by then.

    A step may take as long as it takes: a process that computes, or waits for a device, is as it should be. One that a
    signal or a debugger has stopped does nothing until it is continued, and only the system knows. So there is no
    thread in the core that would answer in its place, and nothing for the step loop to do.
    """

    def __init__(self, pid: int) -> None:
        self._processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            self._processes = [process, *process.children(recursive=True)]

    def stopped(self) -> bool:
        """Whether one of them is. One look at each: it may be asked with every `/health`."""
        for process in self._processes:
            with contextlib.suppress(psutil.Error):  # it has ended, which others notice
                if process.status() in _STOPPED:
                    return True
        return False
