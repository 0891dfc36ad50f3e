"""Ranks as real processes: one process imports torch, and forks a child for each rank of each meeting.

The parent is a plain Python process without threads (no `engine.process.Child`, whose other side has some), so forking
it is safe, and a rank starts in milliseconds instead of seconds. `python -m engine_sdk.conformance.communicator.ranks`
reads one meeting a line on stdin, answers with one line each, and ends when stdin does. A rank writes what it found
into the meeting's directory.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.plugin import Registry, load_body
from engine.plugin.choosing import ranked
from engine.types.parallel import GroupPlace, Parallel, Place
from engine_sdk.conformance.subject import Subject

LONGEST = 60.0
"""Seconds that a meeting may take; what is not done by then is killed, and has failed."""


@dataclass(frozen=True)
class RankResult:
    """What became of one rank.

    Args:
        code: its exit code; negative for the signal that ended it.
        found: what its scenario answered; None where it came to no end.
        error: the traceback of what it raised.
    """

    code: int
    found: Any
    error: str


@dataclass(frozen=True)
class Meeting:
    """All ranks of one meeting, and seconds from the first fork until the last rank had ended."""

    ranks: list[RankResult]
    seconds: float

    def found(self) -> list[Any]:
        """What every rank answered. Raises AssertionError with the traceback of one that failed."""
        for number, rank in enumerate(self.ranks):
            how = rank.error or f"it ended with code {rank.code} and without an answer"
            assert rank.code == 0 and rank.found is not None, f"rank {number} of {len(self.ranks)}: {how}"
        return [rank.found for rank in self.ranks]


class Ranks:
    """The process that forks ranks, of any driver."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "engine_sdk.conformance.communicator.ranks"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def meet(
        self,
        subject: Subject,
        body: type,
        scenario: str,
        size: int,
        device: str = "cpu",
        platform_options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Meeting:
        """Run a scenario of `engine_sdk.conformance.communicator.scenarios` on all ranks of a new group.

        body: the class to build, which the ranks import by its name. platform_options: of the device's platform.
        """
        import torch

        with tempfile.TemporaryDirectory(prefix="engine-ranks-") as folder:
            order = {
                "scenario": scenario, "size": size, "folder": folder, "device": device, "arguments": arguments,
                "subject": subject.plain, "body": f"{body.__module__}:{body.__qualname__}", "path": sys.path,
                "platform_options": dict(platform_options or {}),
            }  # fmt: skip
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], 3 * LONGEST)[0]:
                self._process.kill()
                raise AssertionError(f"the process that forks ranks has not answered for {3 * LONGEST:g} s: {scenario}")
            line = self._process.stdout.readline()
            assert line, "the process that forks ranks has ended"
            answer, ranks = json.loads(line), []
            for number, code in enumerate(answer["codes"]):
                result, error = Path(folder, f"{number}.pt"), Path(folder, f"{number}.txt")
                found = torch.load(result, weights_only=False) if result.exists() else None
                ranks.append(RankResult(code, found, error.read_text() if error.exists() else ""))
        return Meeting(ranks, answer["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


# -- the process that forks ------------------------------------------------------------------------------------------
def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    # Imported before the fork, once for all. Nothing is built here: no thread may run when the process forks.
    from engine_sdk.conformance.communicator import scenarios

    del scenarios
    registry = Registry.discover()
    for _, card in ranked(registry, "platform")[0]:
        if card.framework == "torch":
            load_body(card)
    for line in sys.stdin:
        order, start = json.loads(line), time.monotonic()
        sys.path[:] = order["path"]
        os.mkdir(Path(order["folder"], "meeting"))
        codes = _wait([_fork(order, rank, registry) for rank in range(order["size"])], start + LONGEST)
        print(json.dumps({"codes": codes, "seconds": time.monotonic() - start}), flush=True)


def _fork(order: dict[str, Any], rank: int, registry: Registry) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        sys.stdin.close()
        _work(order, rank, registry)
        code = 0
    except BaseException:
        Path(order["folder"], f"{rank}.txt").write_text(traceback.format_exc())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _work(order: dict[str, Any], rank: int, registry: Registry) -> None:
    import torch

    from engine_sdk.conformance.communicator import scenarios
    from engine_sdk.conformance.communicator.on_device import OnDevice
    from engine_sdk.conformance.contexts import worker_context

    module, _, name = order["body"].partition(":")
    body = getattr(importlib.import_module(module), name)
    meeting = str(Path(order["folder"], "meeting"))
    context = worker_context(
        Subject.of_plain(order["subject"]), order["device"], registry=registry, with_ops=False,
        parallel=Parallel(tp=order["size"]), place=Place(rank=rank), platform_options=order["platform_options"],
    )  # fmt: skip
    members = tuple(range(order["size"]))
    group = GroupPlace(name="tp", rank=rank, size=len(members), members=members, rendezvous=meeting)
    communicator = body(replace(context, group=group))
    assert context.device is not None
    seen = communicator if context.device.type == "cpu" else OnDevice(communicator, context.device)
    found = getattr(scenarios, order["scenario"])(seen, rank, order["size"], **order["arguments"])
    part = Path(order["folder"], f"{rank}.part")
    torch.save(found, part)
    part.rename(Path(order["folder"], f"{rank}.pt"))
    communicator.close()


def _wait(children: list[int], deadline: float) -> list[int]:
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.002)
    return [codes[child] for child in children]


if __name__ == "__main__":
    _serve()
