"""The worker's side: an engine behind lines of JSON on its standard input and output.

Read by every peer's own interpreter, so it needs the standard library alone. The driver writes one object a line and
gets one object back for each; what the engine itself prints goes to standard error.

| message | does | answer |
|---|---|---|
| {"do": "prepare", "settings": {...}} | converts the checkpoint where this engine must | {"ok": true} |
| {"do": "load", "settings": {...}} | starts the engine | {"ok": true, "versions": {...}} |
| {"do": "run", "calls": [[{"prompt": [ids], "output_len": n}, ...], ...], "clock": "wall"} | makes the calls, one \
after the other; "cpu": in this process's processor time | \
{"ok": true, "seconds": [a call's, ...], "outputs": [[[ids], ...], ...]} |
| {"do": "quit"} | ends | {"ok": true} |

A failure is {"ok": false, "error": "..."}; the worker goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

GGUF = ("q8_0", "q4_k_m")
"""Forms of weights in a GGUF file that both engines read."""
DRAFTS = 4
"""Of each step, where a draft model drafts: no engine chooses their number by itself then."""
ADAPTERS, RANK = 8, 16
"""LoRA adapters, each request of a call being for the next of them, and their rank."""
_PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>."""


@dataclass(frozen=True)
class Settings:
    """How an engine is to be started.

    Args:
        checkpoint: folder with config.json, safetensors and tokenizer.
        converted: a folder of this peer's own for what it makes of the checkpoint; it need not exist.
        weights: "bf16", "int8" or "int4"; one of `GGUF`: the file that llama.cpp makes, for both; "draft": bf16, with
            the draft model in the checkpoint's folder "draft"; "lora": bf16, with the adapters in its folder
            "adapters"; "kv8": bf16, with keys and values of 8 bits.
        threads: processor cores to use, all of them.
        max_model_len: tokens of the longest context.
        max_num_seqs: requests that may run at once.
        kv_bytes: memory for keys and values, where the engine wants to be told.
        level: of processor features to keep to, a name of `LEVELS`; "": all that there are.
    """

    checkpoint: str
    converted: str
    weights: str
    threads: int
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    level: str = ""

    @property
    def converted_folder(self) -> Path:
        """As a path."""
        return Path(self.converted)

    @property
    def gguf_file(self) -> Path:
        """The one that llama.cpp makes."""
        return self.converted_folder.parents[1] / "llama.cpp" / self.converted_folder.name / "model.gguf"

    def adapters(self, make: Callable[[str, int, str], Any]) -> list[Any]:
        """Of each adapter what `make` makes of a name, a number from 1 and its folder; none where there are none."""
        folders = sorted((Path(self.checkpoint) / "adapters").iterdir()) if self.weights == "lora" else []
        return [make(f"adapter-{number}", number, str(folder)) for number, folder in enumerate(folders, 1)]

    @property
    def draft_folder(self) -> Path:
        """Of the draft model, where there is one."""
        return Path(self.checkpoint) / "draft"


class Worker(Protocol):
    """An engine, driven."""

    def prepare(self, settings: Settings) -> None:
        """Convert the checkpoint, where needed and not there yet. Not timed."""

    def load(self, settings: Settings) -> Sequence[str]:
        """Start the engine. Returns the distributions whose versions belong to the result."""

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Complete all prompts, handed over at once, greedily and past any end of sequence.

        Returns: for each prompt the new token ids, as many as asked for.
        """


def versions(distributions: Sequence[str]) -> dict[str, str]:
    """Of installed distributions; those that there are not are left out."""
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def now(clock: str) -> float:
    """Seconds, by the clock of a message."""
    return time.process_time() if clock == "cpu" else time.perf_counter()


def answer(worker: Worker, message: dict[str, Any]) -> dict[str, Any]:
    """Do what one message asks. Raises whatever the engine raises."""
    if message["do"] == "prepare":
        worker.prepare(Settings(**message["settings"]))
        return {}
    if message["do"] == "load":
        return {"versions": versions(worker.load(Settings(**message["settings"])))}
    if message["do"] == "run":
        seconds, outputs = [], []
        for call in message["calls"]:
            prompts, lens = [request["prompt"] for request in call], [request["output_len"] for request in call]
            began = now(message["clock"])
            outputs.append(worker.generate(prompts, lens))
            seconds.append(now(message["clock"]) - began)
        return {"seconds": seconds, "outputs": outputs}
    if message["do"] == "quit":
        return {}
    raise ValueError(f"unknown message {message['do']!r}")


def converse(worker: Worker, lines: TextIO, out: TextIO) -> None:
    """Answer until told to quit, or until the driver hangs up."""
    for line in lines:
        message = json.loads(line)
        try:
            reply = {"ok": True} | answer(worker, message)
        except Exception as error:
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()
        if message["do"] == "quit":
            return


def end_with_driver() -> None:
    """Have the kernel kill this process when the driver ends, however it ends (Linux only): a worker that is held still
    would not see that the driver hung up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(worker: Worker) -> None:
    """Be a worker process: the real standard output is kept for answers, everything else is turned to standard error.

    The process ends without Python's own end: an engine that hangs in its destructors is none of the driver's business.
    """
    end_with_driver()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    converse(worker, sys.stdin, out)
    sys.stderr.flush()
    os._exit(0)
