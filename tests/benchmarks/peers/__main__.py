"""The command: `python -m tests.benchmarks.peers --peer llama.cpp --model 0.6B --work W1,W2 --pairs 5`."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine_bench.probe import probe
from tests.benchmarks.peers.checkpoint import checkpoint
from tests.benchmarks.peers.compare import Bench, Engine, compare
from tests.benchmarks.peers.dimensions import MODELS
from tests.benchmarks.peers.environment import InstallError, default_cache, interpreter
from tests.benchmarks.peers.page import page
from tests.benchmarks.peers.peer import LEVELS
from tests.benchmarks.peers.registry import OURS, PEERS
from tests.benchmarks.peers.results import LeftOut, Results, Task

DEFAULT_WORK = "W1,W2,W3,W4,W1-int8,W1-int4,W1-draft"
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__)
    flags.add_argument("--peer", default="all", help=f"comma-separated: {', '.join(PEERS)}; or all")
    flags.add_argument("--model", default="10M,0.6B", help=f"comma-separated: {', '.join(MODELS)}")
    flags.add_argument(
        "--work", default=DEFAULT_WORK, help="comma-separated: W1 .. W6, with -int8, -int4, -draft, -lora or -kv8 added"
    )
    flags.add_argument("--pairs", type=int, default=5, help="measurements of each engine and work (default: 5)")
    flags.add_argument("--starts", type=int, default=2, help="starts of each engine, the first a cold one (default: 2)")
    flags.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    flags.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time, with --threads 1, for a machine that others work on (default: wall)",
    )
    flags.add_argument(
        "--level", choices=[name for name in LEVELS if name], default="",
        help="keep every engine to these processor features (default: all that there are)",
    )  # fmt: skip
    flags.add_argument("--cache", type=Path, default=default_cache(), help="environments, checkpoints, logs")
    flags.add_argument("--jobs", type=int, default=2, help="compilers at once while a peer is built (default: 2)")
    flags.add_argument("--install-only", action="store_true", help="make the environments and checkpoints, and stop")
    flags.add_argument(
        "--json", type=Path, help="the results, written after each engine and model (default: in the cache)"
    )
    flags.add_argument("--page", type=Path, help="write the Markdown page here (default: to standard output)")
    flags.add_argument(
        "--from", dest="sources", type=Path, nargs="+", metavar="JSON", help="measure nothing: write these results"
    )
    return flags


def chosen(text: str, known: Sequence[str], flag: str) -> list[str]:
    """The names in a comma-separated list; "all" is all. Raises SystemExit naming the flag."""
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise SystemExit(f"{flag} {name}: there is none; write {', '.join(known)}")
    return names


def processor_features(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Of `FEATURES`, those that this processor has; empty where the system does not say."""
    try:
        words = {word for line in path.read_text().splitlines() if line.startswith(("flags", "Features"))
                 for word in line.split()}  # fmt: skip
    except OSError:
        return []
    return [feature for feature in FEATURES if feature in words]


def say(text: str) -> None:
    """A line of progress."""
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def command_of(asked: argparse.Namespace) -> str:
    """The command that measures the same, without the folders of whoever ran it."""
    words = ["python", "-m", "tests.benchmarks.peers", "--peer", asked.peer, "--model", asked.model]
    words += ["--work", asked.work, "--pairs", str(asked.pairs), "--starts", str(asked.starts)]
    words += ["--threads", str(asked.threads), "--clock", "cpu"] if asked.clock == "cpu" else []
    words += ["--level", asked.level] if asked.level else []
    return shlex.join(words)


def measure(asked: argparse.Namespace) -> Results:
    """All that is asked for; peers that cannot be had, or fail, are named in the result."""
    cache = asked.cache.resolve()
    peers = [PEERS[name] for name in chosen(asked.peer, list(PEERS), "--peer")]
    models = [MODELS[name] for name in chosen(asked.model, list(MODELS), "--model")]
    try:
        tasks = [Task.parse(text.strip()) for text in asked.work.split(",")]
    except ValueError as error:
        raise SystemExit(f"--work: {error}") from None
    if min(asked.pairs, asked.starts, asked.threads) < 1:
        raise SystemExit("--pairs, --starts and --threads are at least 1")
    if asked.clock == "cpu" and asked.threads > 1:
        raise SystemExit("--clock cpu: several threads wait for each other in that time too; add --threads 1")
    results = Results(
        commands=[command_of(asked)],
        date=datetime.date.today().isoformat(),
        threads=asked.threads,
        features=[asked.level] if asked.level else processor_features(),
        pairs=asked.pairs,
    )
    bench = Bench(
        cache=cache,
        threads=asked.threads,
        clock=asked.clock,
        pairs=asked.pairs,
        starts=asked.starts,
        probe=partial(probe, "bfloat16"),
        say=say,
        level=asked.level,
    )
    target = asked.json or cache / "results" / f"{datetime.datetime.now():%Y-%m-%dT%H-%M-%S}.json"
    say(f"results go to {target}")
    folders = {
        (model.name, drafts): checkpoint(model, cache, draft=drafts, adapters="lora" in {one.weights for one in tasks})
        for model in models
        for drafts in {task.weights == "draft" for task in tasks}
    }
    ours = Engine(OURS, interpreter(OURS, cache, asked.jobs, asked.level))
    for peer in peers:
        if asked.level and peer.unheld:
            say(f"{peer.name} cannot be kept to {asked.level}: {peer.unheld}")
            results.left_out.append(LeftOut(f"{peer.name}, kept to {asked.level}", peer.unheld))
            continue
        try:
            theirs = Engine(peer, interpreter(peer, cache, asked.jobs, asked.level))
        except InstallError as error:
            say(f"{peer.name}: {error} (all of it: {error.log})")
            results.left_out.append(LeftOut(peer.name, str(error)))
            continue
        say(f"{peer.name} is installed")
        for model in models if not asked.install_only else []:
            for weights in dict.fromkeys(task.weights for task in tasks):
                if weights not in peer.weights:
                    results.left_out.append(LeftOut(f"{peer.name}, {weights}", "it has no such weights on processors"))
                    continue
                own = [task for task in tasks if task.weights == weights]
                compare(bench, results, ours, theirs, model, folders[model.name, weights == "draft"], weights, own)
                results.save(target)
    results.left_out = list(dict.fromkeys(results.left_out))
    if not asked.install_only:
        results.save(target)
    return results


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit code."""
    asked = parser().parse_args(arguments)
    if asked.sources:
        results = Results.load(asked.sources[0])
        for source in asked.sources[1:]:
            later = Results.load(source)
            if differs := results.differs(later):
                raise SystemExit(f"--from {source}: {differs}; write a page of each")
            results.add(later)
        if asked.json is not None:
            results.save(asked.json)
    else:
        signal.signal(signal.SIGTERM, _end)  # so that the workers are ended too
        results = measure(asked)
        if asked.install_only:
            return 1 if results.left_out else 0
    if asked.page is not None:
        asked.page.parent.mkdir(parents=True, exist_ok=True)
        asked.page.write_text(page(results), encoding="utf-8")
    else:
        print(page(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
