"""Ranks as processes: `python shm_rank.py WORK SIZE FOLDER ...` forks itself for each of these meetings in turn, and
says on stdout, in a line of JSON for each, with which exit code and with which words each of its ranks ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from types import SimpleNamespace

import torch

from engine_cpu.communicator_shm.body import Shm


def rounds(rank: int, size: int, shm: Shm) -> str:
    """Many small and large collectives without a pause, with ranks that dawdle in turn."""
    torch.manual_seed(0)
    for turn in range(300):
        count = int(torch.randint(1, 200_000 if turn % 20 == 0 else 3000, ()))
        parts = [torch.randint(-9, 9, (count,)).float() for _ in range(size)]
        if turn % 50 == rank:
            time.sleep(0.01)
        assert torch.equal(shm.all_reduce(parts[rank].clone()), sum(parts)), turn
        whole = shm.all_gather(parts[rank], 0, [count] * size)
        assert torch.equal(whole, torch.cat(parts)), turn
        if turn % 3 == 0 and size > 1:
            source, to = turn % size, (turn + 1) % size
            if rank == source:
                shm.send(parts[rank], to)
            elif rank == to:
                got = torch.empty(count)
                shm.recv(got, source)
                assert torch.equal(got, parts[source]), turn
    return "right"


def killed(rank: int, size: int, shm: Shm) -> str:
    """The last rank is killed while the others wait for it."""
    shm.all_reduce(torch.ones(1000))
    if rank == size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        shm.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        try:
            shm.barrier()
        except RuntimeError as again:
            assert "earlier" in str(again)
            return str(error)
    return "no error"


def mapped(rank: int, size: int, shm: Shm) -> str:
    """What of the shared memory has a name."""
    with open("/proc/self/maps") as lines:
        return ",".join(sorted({line.split(maxsplit=5)[5].strip() for line in lines if "engine-shm" in line}))


def forked(rank: int, size: int, folder: str, work: str) -> tuple[int, int]:
    """(process id, end of a pipe) of a rank."""
    answer, said = os.pipe()
    if pid := os.fork():
        os.close(said)
        return pid, answer
    code = 1
    try:
        torch.set_num_threads(1)
        place = SimpleNamespace(rank=rank, size=size, rendezvous=folder)
        communicator = Shm(SimpleNamespace(group=place))  # type: ignore[arg-type]
        works = {"rounds": rounds, "killed": killed, "mapped": mapped}
        os.write(said, works[work](rank, size, communicator).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def meet(work: str, size: int, folder: str) -> list[tuple[int, str]]:
    """(exit code, answer) of each rank."""
    ranks, ended = [forked(rank, size, folder, work) for rank in range(size)], []
    for pid, pipe in ranks:
        with open(pipe) as lines:
            said = lines.read()
        ended.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said))
    return ended


if __name__ == "__main__":
    for work, size, folder in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3], strict=True):
        print(json.dumps(meet(work, int(size), folder)), flush=True)
