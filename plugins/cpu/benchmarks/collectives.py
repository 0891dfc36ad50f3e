"""Communicators side by side: `python plugins/cpu/benchmarks/collectives.py --ranks 2 shm gloo`.

Each rank is a process with one thread. The drivers take turns (A B A B), each in fresh processes. Times are of a call,
in microseconds: the median over calls, of the slowest rank, and of all turns; ratios are the median of the pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import SimpleNamespace

SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20)
"""Bytes."""
COLLECTIVES = ("all_reduce", "all_gather")
DTYPE = "bfloat16"


def measure(driver: str, rank: int, ranks: int, folder: str) -> dict[str, float]:
    """Median microseconds of a call, by collective and size, on this rank."""
    import torch

    from engine.plugin import Registry
    from engine.plugin.loading import load_body

    torch.set_num_threads(1)
    registry = Registry.discover()
    candidate = registry.find("communicator", driver)
    body = load_body(registry.card(candidate), candidate=candidate)
    communicator = body(SimpleNamespace(group=SimpleNamespace(rank=rank, size=ranks, rendezvous=folder)))
    found = {}
    for size in SIZES:
        x = torch.ones(size // 2, dtype=getattr(torch, DTYPE))
        part = x[: len(x) // ranks].clone()
        calls = {
            "all_reduce": lambda x=x: communicator.all_reduce(x),
            "all_gather": lambda part=part: communicator.all_gather(part, 0, [len(part)] * ranks),
        }
        for name in COLLECTIVES:
            times = []
            for turn in range(30 if size > 1 << 20 else 150):
                x.fill_(1)
                communicator.barrier()
                start = time.perf_counter()
                calls[name]()
                if turn >= 5:
                    times.append(1e6 * (time.perf_counter() - start))
            found[f"{name} {size >> 10} KiB"] = statistics.median(times)
    communicator.barrier()
    communicator.close()
    return found


def run(driver: str, ranks: int) -> dict[str, float]:
    """One turn of a driver, in processes of its own; the slowest rank's medians."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(ranks), "--folder", folder, driver, "--rank"]
        processes = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE) for r in range(ranks)]
        answers = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drivers in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drivers", nargs="+", help="the driver, then what it is compared with")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.rank is not None:
        print(json.dumps(measure(asked.drivers[0], asked.rank, asked.ranks, asked.folder)))
        return 0
    turns: dict[str, list[dict[str, float]]] = {driver: [] for driver in asked.drivers}
    for _ in range(asked.pairs):
        for driver in asked.drivers:
            turns[driver].append(run(driver, asked.ranks))
    first, *others = asked.drivers
    print(f"{asked.ranks} ranks, {DTYPE}, {asked.pairs} interleaved turns; microseconds a call")
    for name in turns[first][0]:
        cells = [f"{driver} {statistics.median(turn[name] for turn in turns[driver]):9.1f}" for driver in turns]
        for other in others:
            pairs = zip(turns[first], turns[other], strict=True)
            ratio = statistics.median(theirs[name] / ours[name] for ours, theirs in pairs)
            cells.append(f"{other}/{first} {ratio:5.1f}")
        print(f"{name:24}" + "   ".join(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
