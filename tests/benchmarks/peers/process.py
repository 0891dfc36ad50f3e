"""The driver's side of a worker process: started, asked, held still while another is measured, ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from tests.benchmarks.peers.peer import LEVELS, Peer
from tests.benchmarks.peers.protocol import Settings
from tests.benchmarks.peers.workloads import Call

ROOT = Path(__file__).resolve().parents[3]
LOAD_SECONDS = 1200
RUN_SECONDS = 1800
END_SECONDS = 20


class WorkerError(Exception):
    """A worker failed, fell silent, or did not do what it was asked: the message says how. `log`: its output."""

    def __init__(self, text: str, log: Path) -> None:
        super().__init__(text)
        self.log = log


@dataclass(frozen=True)
class Answer:
    """What a worker returned for the calls of one measurement.

    Args:
        seconds: of each call, by the worker's clock.
        outputs: [call][request] -> token ids.
    """

    seconds: list[float]
    outputs: list[list[list[int]]]


class PeerProcess:
    """A worker of `peer`, in a process group of its own.

    Args:
        python: the interpreter that has the engine.
        cache: for its log and for what it compiles at run time.
        settings: how the engine is to be started (by `load`).
    """

    def __init__(self, peer: Peer, python: Path, cache: Path, settings: Settings) -> None:
        self.peer = peer
        self.settings = settings
        self.versions: dict[str, str] = {}
        self._log = cache / "logs" / f"worker-{peer.name}.txt"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._began = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", peer.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=worker_environment(peer, cache, settings),
                cwd=self._log.parent,
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def prepare(self) -> None:
        """Let it convert the checkpoint. Raises WorkerError."""
        self._ask({"do": "prepare", "settings": asdict(self.settings)}, LOAD_SECONDS)

    def load(self) -> None:
        """Start the engine. Raises WorkerError."""
        self.versions = self._ask({"do": "load", "settings": asdict(self.settings)}, LOAD_SECONDS)["versions"]

    def seconds_since_start(self) -> float:
        """Since the process was started."""
        return time.perf_counter() - self._began

    def run(self, calls: Sequence[Call], vocab_size: int, clock: str = "wall") -> Answer:
        """Make the calls and check what comes back. clock: "wall" or "cpu", see `protocol`.

        Raises WorkerError: it failed; a request has more or fewer tokens than asked for, or one outside the vocabulary;
            or the calls are said to have taken longer than the answer took, or much less.
        """
        asked = [[request._asdict() for request in call] for call in calls]
        began = time.perf_counter()
        reply = self._ask({"do": "run", "calls": asked, "clock": clock}, RUN_SECONDS)
        wall = time.perf_counter() - began
        answer = Answer(reply["seconds"], reply["outputs"])
        self._check(answer, calls, vocab_size, wall, clock)
        return answer

    def _check(self, answer: Answer, calls: Sequence[Call], vocab_size: int, wall: float, clock: str) -> None:
        if len(answer.seconds) != len(calls) or len(answer.outputs) != len(calls):
            raise self._error(f"{len(calls)} calls, answers for {len(answer.seconds)} and {len(answer.outputs)}")
        for call, outputs in zip(calls, answer.outputs, strict=True):
            found, wanted = [len(tokens) for tokens in outputs], [request.output_len for request in call]
            if found != wanted:
                raise self._error(f"asked for {wanted} tokens, got {found}")
            if any(not 0 <= token < vocab_size for tokens in outputs for token in tokens):
                raise self._error(f"token ids outside the vocabulary of {vocab_size}")
        # The pipe carries a few hundred kilobytes at most: that takes no half second and no tenth of the work.
        claimed = sum(answer.seconds)
        least = wall * 0.9 - 0.5 if clock == "wall" else 0.0
        if min(answer.seconds) <= 0 or not least <= claimed <= wall:
            raise self._error(f"says that the calls took {claimed:.3f} s; the answer took {wall:.3f} s")

    def pause(self) -> None:
        """Hold all its processes still, so that none of them takes anything from who is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def peak_memory(self) -> int:
        """Bytes: the most that each process of the worker had in memory at once, summed (the kernel's VmHWM)."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(OSError, psutil.NoSuchProcess):
                    text = Path(f"/proc/{process.pid}/status").read_text()
                    total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM"))
        return total

    def close(self, ask: bool = True) -> None:
        """End it: asked first, killed with all its processes where that does not help. Idempotent."""
        if ask and self._process.poll() is None:
            self.resume()
            with contextlib.suppress(WorkerError):
                self._ask({"do": "quit"}, END_SECONDS)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # Whoever is interrupted does not wait for an engine that may be in the middle of its work.
        self.close(ask=kind is None or issubclass(kind, Exception))

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=seconds)
        except (BrokenPipeError, ValueError):
            line = ""
        except queue.Empty:
            raise self._error(f"no answer to {message['do']!r} within {seconds:g} s") from None
        if not line:
            self._lines.put("")  # whoever asks next need not wait
            raise self._error(f"ended while it was asked to {message['do']!r}: {self._last_line()}")
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise self._error(reply["error"])
        return reply

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "it said nothing"

    def _error(self, text: str) -> WorkerError:
        return WorkerError(f"{self.peer.name}: {text}", self._log)


def compiled_folder(peer: Peer, cache: Path) -> Path:
    """Where an engine keeps what it compiles at run time."""
    return cache / "compiled" / peer.name


def forget_compiled(peer: Peer, cache: Path) -> None:
    """Make the next start a first one."""
    shutil.rmtree(compiled_folder(peer, cache), ignore_errors=True)


def worker_environment(peer: Peer, cache: Path, settings: Settings) -> dict[str, str]:
    """The driver's own, but for what would let a worker find other packages than its own."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= LEVELS[settings.level]
    environment |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    values = {
        "compiled": compiled_folder(peer, cache),
        "cores": f"0-{settings.threads - 1}",
        "kv_gib": math.ceil(settings.kv_bytes / 2**30),
    }
    return environment | {name: text.format(**values) for name, text in peer.environment.items()}
