"""`shm` between processes. What it computes is tested with every other communicator, in core/tests/distributed/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture
def shm(native):
    """The body's class."""
    from engine_cpu.communicator_shm.body import Shm

    return Shm


MEETINGS = [("rounds", 2), ("rounds", 3), ("rounds", 6), ("killed", 3), ("mapped", 2)]
"""6: more than many a machine has cores."""


@pytest.fixture(scope="module")
def ended(native) -> dict[tuple[str, int], list[tuple[int, str]]]:
    """Exit code and answer of each rank, by meeting: one process imports torch and forks all of them."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "shm_rank.py")]
        for work, size in MEETINGS:
            (own := Path(folder, f"{work}{size}")).mkdir()
            command += [work, str(size), str(own)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
        assert not any(map(os.listdir, Path(folder).iterdir())), "the ranks' directories are as they were"
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "engine" in name}
    answers = [[(code, answer) for code, answer in json.loads(line)] for line in done.stdout.splitlines()]
    return dict(zip(MEETINGS, answers, strict=True))


def on_threads(shm: type, size: int, work) -> list:
    """work(rank, communicator) on a thread each."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:

        def rank(number: int):
            return work(number, shm(SimpleNamespace(group=SimpleNamespace(rank=number, size=size, rendezvous=folder))))

        return [future.result(60) for future in [threads.submit(rank, r) for r in range(size)]]


@pytest.mark.parametrize("size", [2, 3, 6])
def test_many_rounds(ended, size: int) -> None:
    assert ended["rounds", size] == [(0, "right")] * size


def test_a_killed_rank_is_an_error_for_all_others(ended) -> None:
    *others, killed = ended["killed", 3]
    assert killed == (-9, "")
    for code, answer in others:
        assert code == 0 and "rank" in answer and "has gone" in answer


def test_the_memory_has_no_name(ended) -> None:
    """Nothing is left behind, whoever is killed: the system frees it with the last process."""
    assert ended["mapped", 2] == [(0, "/memfd:engine-shm (deleted)")] * 2


def test_calls_that_do_not_match(shm) -> None:
    """Another size or another collective is an error on both ranks, not garbage and no hang."""

    def work(rank: int, communicator) -> str:
        try:
            communicator.all_reduce(torch.ones(3 + rank))
        except RuntimeError as error:
            return str(error)
        return ""

    answers = on_threads(shm, 2, work)
    assert any("another collective, or one of another size" in answer for answer in answers) and all(answers)


def test_sizes_that_do_not_match(shm) -> None:
    def sent(rank: int, communicator) -> str:
        try:
            if rank == 0:
                communicator.send(torch.ones(3), 1)
                communicator.barrier()
            else:
                communicator.recv(torch.ones(4), 0)
        except RuntimeError as error:
            return str(error)
        return ""

    assert "another size" in on_threads(shm, 2, sent)[1]

    def exchanged(rank: int, communicator) -> str:
        try:
            communicator.all_to_all(torch.ones(4), [2, 2], [2, 2] if rank else [2, 1])
        except RuntimeError as error:
            return str(error)
        return ""

    assert "rank 1 sends 8 bytes where 4 are expected" in on_threads(shm, 2, exchanged)[0]


def test_a_rank_that_does_not_come(native) -> None:
    from engine_cpu.communicator_shm.meeting import meet

    for rank in (0, 1):
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(RuntimeError, match=f"rank {rank} of 2 met not all others within 0 s"):
                meet(folder, rank, 2, 4096, 0.2)
            assert not os.listdir(folder)


def test_a_wait_has_an_end(native) -> None:
    """A rank that lives and does not come."""
    memory, (a, b) = os.memfd_create("test"), __import__("socket").socketpair()
    os.truncate(memory, native.shm_bytes(2))
    group = native.ShmGroup(memory, 0, 2, [-1, a.detach()], 0.1)
    with pytest.raises(RuntimeError, match="rank 1 did not come for 0 s"):
        group.barrier()
    group.close()
    b.close()
    os.close(memory)


def test_other_threads_go_on_while_a_rank_waits(shm) -> None:
    """The interpreter's lock is not held."""
    turns = []

    def work(rank: int, communicator) -> None:
        if rank == 0:
            communicator.barrier()
            return
        deadline = time.monotonic() + 30
        while len(turns) < 100 and time.monotonic() < deadline:
            turns.append(threading.get_ident())
        communicator.barrier()

    on_threads(shm, 2, work)
    assert len(turns) == 100
