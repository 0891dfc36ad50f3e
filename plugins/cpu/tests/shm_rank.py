"""One rank as a process: `python shm_rank.py RANK SIZE FOLDER WORK`, where it says on stdout what came of it."""

from __future__ import annotations

import os
import signal
import sys
import time
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, number, count, directory, work = sys.argv
    place = SimpleNamespace(rank=int(number), size=int(count), rendezvous=directory)
    communicator = Shm(SimpleNamespace(start=place))  # type: ignore[arg-type]
    print({"rounds": rounds, "killed": killed, "mapped": mapped}[work](place.rank, place.size, communicator))
