"""Parallel regions: every index once, whatever the threads; errors, forks, and the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=60, deadline=None)
@given(threads=st.integers(1, 9), total=st.integers(0, 300), piece=st.integers(1, 50))
def test_every_index_once(native, threads: int, total: int, piece: int) -> None:
    _, each_once = native.regions(threads, 20, total, piece)
    assert each_once


def test_many_tiny_regions(native) -> None:
    """Of changing sizes, so that threads sit some of them out; more threads than most machines' cores among them."""
    for threads in (2, 4, 3, 16, 2, 5) * 5:
        assert native.regions(threads, 300, threads, 1)[1]


def test_an_error_comes_back_and_leaves_the_pool_whole(native) -> None:
    for fails_at in (0, 17, 63) * 20:
        with pytest.raises(RuntimeError, match="this index fails"):
            native.regions(4, 5, 64, 1, fails_at)
        assert native.regions(4, 5, 64, 1)[1]


def test_several_callers_take_turns(native) -> None:
    """Threads of Python that compute at once, as two engines in one process do."""
    found = []
    work = [threading.Thread(target=lambda: found.append(native.regions(3, 500, 30, 1)[1])) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert found == [True] * 4


def test_a_child_of_fork_makes_its_own(native) -> None:
    assert native.regions(3, 10, 30, 1)[1]
    child = os.fork()
    if child == 0:
        fresh = native.pool_size() == 0
        os._exit(0 if fresh and native.regions(3, 100, 30, 1)[1] and native.pool_size() == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert native.regions(3, 10, 30, 1)[1]


def test_idle_threads_sleep_and_the_process_ends(native) -> None:
    """After a while without work the threads take no time; and none of them keeps the process from ending."""
    script = (
        "import time, engine_cpu._native as native\n"
        "assert native.regions(4, 100, 40, 1)[1] and native.pool_size() == 3\n"
        "time.sleep(0.05); began = time.process_time(); time.sleep(0.3)\n"
        "print(time.process_time() - began)\n"
        "assert native.regions(4, 100, 40, 1)[1]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.1


def test_signals_are_left_to_python(native) -> None:
    """A pool's thread blocks them, so that handlers run where Python waits for them; but not those of its own faults,
    which nobody else could report."""
    assert native.regions(3, 10, 30, 1)[1]
    pool = [task for task in Path("/proc/self/task").iterdir() if "engine-cpu" in (task / "comm").read_text()]
    assert len(pool) == native.pool_size()
    for task in pool:
        blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk:"))
        mask = int(blocked.split()[1], 16)
        assert all(mask & 1 << number - 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD))
        assert not any(
            mask & 1 << number - 1 for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
        )


def test_more_threads_than_cores(native) -> None:
    """On one core, where the others are never there in time: everything is done all the same."""
    script = (
        "import os, engine_cpu._native as native\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "for pieces in (2, 9, 64):\n"
        "    assert native.regions(6, 200, pieces, 1)[1]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_torch_s_threads_go_to_sleep() -> None:
    """GNU's OpenMP library keeps its threads turning for 10 ms and more after each region, unless it manages more of
    them than there are cores: the first region of ours sees to that. On 4 threads it is 40 ms of processor time."""
    script = (
        "import ctypes, statistics, time, torch, engine_cpu._native as native\n"
        "if not hasattr(ctypes.CDLL(None), 'GOMP_parallel'): print(0.0); raise SystemExit\n"
        "torch.set_num_threads(4)\n"
        "a = torch.ones(256, 256)\n"
        "def turning():\n"
        "    a @ a; began = time.process_time(); time.sleep(0.03)\n"
        "    return time.process_time() - began\n"
        "native.regions(2, 3, 40, 1)\n"
        "print(statistics.median(turning() for _ in range(9)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.005


def test_what_keeps_them_asleep_leaves_signals_and_the_end_alone() -> None:
    """A team of one more than there are cores: it is made once, blocks every signal, and ends with the process; a child
    of fork() does without."""
    script = (
        "import ctypes, os, pathlib, signal, time, torch, engine_cpu._native as native\n"
        "def team(): return [task for task in pathlib.Path('/proc/self/task').iterdir()\n"
        "                    if (task / 'comm').read_text() == 'engine-omp\\n']\n"
        "known = hasattr(ctypes.CDLL(None), 'GOMP_parallel')\n"
        "size = len(os.sched_getaffinity(0)) + 1 if known else 0\n"
        "until = time.monotonic() + 30\n"
        "while len(team()) != size and time.monotonic() < until: native.regions(3, 10, 40, 1)\n"
        "for _ in range(3): native.regions(3, 10, 40, 1)\n"
        "assert len(team()) == size, (team(), size)\n"
        "for task in team():\n"
        "    line = next(line for line in (task / 'status').read_text().splitlines() if line.startswith('SigBlk:'))\n"
        "    assert int(line.split()[1], 16) & (1 << (signal.SIGINT - 1))\n"
        "if os.fork() == 0: os._exit(0 if native.regions(3, 10, 40, 1)[1] and not team() else 1)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
