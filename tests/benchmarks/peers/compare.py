"""Ours and one peer in turns: A B A B, each held still while the other is measured, the machine probed between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine_bench.probe import Machine
from tests.benchmarks.peers.dimensions import Dimensions
from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.process import PeerProcess, WorkerError, forget_compiled
from tests.benchmarks.peers.protocol import Settings
from tests.benchmarks.peers.results import Comparison, LeftOut, Results, Start, Task
from tests.benchmarks.peers.workloads import KV_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, warm_up

SEED = 1_000
"""Of the first pair; each pair has the next."""


@dataclass(frozen=True)
class Engine:
    """A peer with its interpreter."""

    peer: Peer
    python: Path


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all comparisons of a run have in common.

    Args:
        cache: folder of checkpoints, environments and logs.
        threads: for each engine.
        clock: by which calls are timed: "wall"; "cpu" for engines of one thread on a machine that others work on.
        pairs: measurements of each task and engine.
        starts: of each engine; the last one does the work.
        level: of processor features, see `LEVELS`.
        probe: of the machine.
        say: a line of progress.
    """

    cache: Path
    threads: int
    clock: str
    pairs: int
    starts: int
    probe: Callable[[], Machine]
    say: Callable[[str], None]
    level: str = ""

    def settings(self, engine: Engine, dimensions: Dimensions, checkpoint: Path, weights: str) -> Settings:
        """How an engine is to be started."""
        form = "bf16" if weights == "kv8" else weights
        converted = self.cache / "converted" / engine.peer.name / f"{checkpoint.name}-{form}"
        return Settings(
            checkpoint=str(checkpoint),
            converted=str(converted),
            weights=weights,
            threads=self.threads,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            kv_bytes=dimensions.kv_bytes(KV_TOKENS),
            level=self.level,
        )


@dataclass
class _Side:
    """One of the two engines of a comparison."""

    engine: Engine
    process: PeerProcess
    start: Start


def compare(
    bench: Bench,
    results: Results,
    ours: Engine,
    theirs: Engine,
    dimensions: Dimensions,
    checkpoint: Path,
    weights: str,
    tasks: Sequence[Task],
) -> None:
    """Measure tasks that share a model and a form of weights; `results` takes what is found, and what failed."""
    what = f"{theirs.peer.name}, {dimensions.name}, {weights}"
    with contextlib.ExitStack() as stack:
        try:
            sides = _start(bench, stack, ours, theirs, dimensions, checkpoint, weights)
            for side in sides:
                results.versions[side.engine.peer.name] = side.process.versions
                side.process.resume()
                side.process.run(warm_up(dimensions)[1:], dimensions.vocab_size)
                side.process.pause()
        except WorkerError as error:
            results.left_out.append(LeftOut(what, str(error)))
            bench.say(f"{what}: {error} (its log: {error.log})")
            return
        for task in tasks:
            try:
                found = _pairs(bench, task, sides, dimensions)
            except WorkerError as error:
                results.left_out.append(LeftOut(f"{what}: {task.name}", str(error)))
                bench.say(f"{what}: {task.name}: {error} (its log: {error.log})")
                break
            results.comparisons.append(found)
            bench.say(f"{what}: {task.name}: {found.ratio:.3f} times as good")
        for side in sides:
            results.starts.append(msgspec.structs.replace(side.start, peak_memory=side.process.peak_memory()))


def _start(
    bench: Bench,
    stack: contextlib.ExitStack,
    ours: Engine,
    theirs: Engine,
    dimensions: Dimensions,
    checkpoint: Path,
    weights: str,
) -> tuple[_Side, _Side]:
    """Convert, start both in turns as often as asked, and leave the last two standing, held still."""
    engines = (ours, theirs)
    settings = [bench.settings(engine, dimensions, checkpoint, weights) for engine in engines]
    for engine, own in zip(engines, settings, strict=True):
        with PeerProcess(engine.peer, engine.python, bench.cache, own) as process:
            process.prepare()
        forget_compiled(engine.peer, bench.cache)
    seconds: tuple[list[float], list[float]] = ([], [])
    standing: list[PeerProcess] = []
    for i in range(bench.starts):
        for engine, own, times in zip(engines, settings, seconds, strict=True):
            process = stack.enter_context(PeerProcess(engine.peer, engine.python, bench.cache, own))
            process.load()
            process.run(warm_up(dimensions)[:1], dimensions.vocab_size)
            times.append(process.seconds_since_start())
            bench.say(f"{engine.peer.name}, {dimensions.name}, {weights}: first token after {times[-1]:.2f} s")
            if i + 1 < bench.starts:
                process.close()
            else:
                process.pause()
                standing.append(process)
    first, second = (
        _Side(
            engine,
            process,
            Start(
                model=dimensions.name,
                weights=weights,
                engine=engine.peer.name,
                peer=theirs.peer.name,
                seconds=times,
            ),
        )
        for engine, process, times in zip(engines, standing, seconds, strict=True)
    )
    return first, second


def _pairs(bench: Bench, task: Task, sides: tuple[_Side, _Side], dimensions: Dimensions) -> Comparison:
    figures: tuple[list[float], list[float]] = ([], [])
    machine, same, asked = [bench.probe()], 0, 0
    for i in range(bench.pairs):
        calls = task.work.draw(dimensions, SEED + i)
        first_tokens = []
        for side, values in zip(sides, figures, strict=True):
            side.process.resume()
            answer = side.process.run(calls, dimensions.vocab_size, bench.clock)
            side.process.pause()
            values.append(task.work.figure(calls, answer.seconds))
            first_tokens.append([tokens[0] for outputs in answer.outputs for tokens in outputs])
        same += sum(a == b for a, b in zip(*first_tokens, strict=True))
        asked += len(first_tokens[0])
        machine.append(bench.probe())
        one = f"pair {i + 1} of {task.name}: {figures[0][-1]:.5g} beside {figures[1][-1]:.5g} {task.work.unit}"
        bench.say(f"  {one} ({machine[-1].read_gb_s:.1f} GB/s, {machine[-1].gflop_s:.0f} GFLOP/s)")
    return Comparison(
        model=dimensions.name,
        task=task,
        peer=sides[1].engine.peer.name,
        ours=figures[0],
        theirs=figures[1],
        machine=machine,
        same_first_tokens=same / asked,
    )
