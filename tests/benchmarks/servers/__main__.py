"""The command: `python -m tests.benchmarks.servers --server engine,llama.cpp --model 10M`."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.types.errors import EngineError
from tests.benchmarks.peers.__main__ import chosen, processor_features, say
from tests.benchmarks.peers.checkpoint import checkpoint
from tests.benchmarks.peers.dimensions import MODELS, Dimensions
from tests.benchmarks.peers.environment import InstallError, default_cache, interpreter
from tests.benchmarks.peers.protocol import Settings
from tests.benchmarks.peers.results import LeftOut
from tests.benchmarks.servers.known import NOT_HAD, SERVERS, Server
from tests.benchmarks.servers.page import draw, page
from tests.benchmarks.servers.process import ServerError, ServerProcess, convert
from tests.benchmarks.servers.results import Load, Point, Results, Search, rate_of
from tests.benchmarks.servers.search import FIRST_STEP, NEXT_STEP, measure, search, warm_up

LOADS = {
    "10M": Load(
        turns="2:4", system_prompts=4, system_words=64, words="16:48", output_len="16:64", think_time=0.5,
        seconds=10.0, slo_ttft=1.0, slo_tpot=0.1, max_num_seqs=16,
    ),
    "0.6B": Load(
        turns="2:3", system_prompts=2, system_words=32, words="6:12", output_len="8:16", think_time=0.5,
        seconds=20.0, slo_ttft=1.0, slo_tpot=0.1, max_num_seqs=16,
    ),
}  # fmt: skip
"""What the users of each model do, unless flags say something else."""
STARTS = {"10M": 16, "0.6B": -8}
"""Where the first search of each begins: a place of the grid."""
MAX_MODEL_LEN = 2048
SEED = 1_000
"""Of the first round; each has the next thousand, and no two rates have the same."""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="python -m tests.benchmarks.servers", description=__doc__)
    flags.add_argument("--server", default="all", help=f"comma-separated: {', '.join(SERVERS)}; or all")
    flags.add_argument("--model", default="10M", help=f"comma-separated: {', '.join(LOADS)}")
    flags.add_argument(
        "--rounds", type=int, default=3, help="searches of each server, in turns; 0 only writes the page"
    )
    flags.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    load = flags.add_argument_group("load", "by default what suits the model; LOW:HIGH are ranges")
    load.add_argument("--turns", metavar="LOW:HIGH", help="of a conversation")
    load.add_argument("--system-prompts", type=int, help="different ones, which conversations share")
    load.add_argument("--system-words", type=int, help="words of each")
    load.add_argument("--words", metavar="LOW:HIGH", help="of what a user says")
    load.add_argument("--output-len", metavar="LOW:HIGH", help="tokens of an answer")
    load.add_argument("--think-time", type=float, help="mean seconds before each further turn")
    load.add_argument("--seconds", type=float, help="in which conversations begin, of each rate")
    load.add_argument("--slo-ttft", type=float, help="objective: seconds to the first token")
    load.add_argument("--slo-tpot", type=float, help="objective: seconds between tokens, on average")
    load.add_argument("--max-num-seqs", type=int, help="requests that a server may run at once")
    flags.add_argument("--cache", type=Path, default=default_cache(), help="environments, checkpoints, logs")
    flags.add_argument("--jobs", type=int, default=2, help="compilers at once while a server is built (default: 2)")
    flags.add_argument(
        "--json", type=Path, help="the results (default: in the cache); where they are, rounds are added"
    )
    flags.add_argument("--page", type=Path, help="write the Markdown page here, and its plot beside it")
    return flags


@dataclass(frozen=True)
class _Standing:
    """A server that can be started: with its interpreter."""

    server: Server
    python: Path


def command_of(asked: argparse.Namespace) -> str:
    """The command that measures the same, without the folders of whoever ran it."""
    words = ["python", "-m", "tests.benchmarks.servers", "--server", asked.server, "--model", asked.model]
    words += ["--rounds", str(asked.rounds), "--threads", str(asked.threads)]
    for name in Load.__struct_fields__:
        if (value := getattr(asked, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def load_of(asked: argparse.Namespace, model: str) -> Load:
    """The load of a model, with what the flags change."""
    given = {name: getattr(asked, name) for name in Load.__struct_fields__ if getattr(asked, name) is not None}
    return msgspec.structs.replace(LOADS[model], **given)


def versions_of(standing: _Standing) -> dict[str, str]:
    """Of its distributions, as its own interpreter tells them."""
    program = "import json, sys; from tests.benchmarks.peers.protocol import versions; "
    program += "print(json.dumps(versions(sys.argv[1:])))"
    command = [str(standing.python), "-c", program, *standing.server.versions]
    root = Path(__file__).resolve().parents[3]
    return dict(msgspec.json.decode(subprocess.run(command, cwd=root, capture_output=True, check=True).stdout))


def settings_of(
    asked: argparse.Namespace, standing: _Standing, dimensions: Dimensions, folder: Path, max_num_seqs: int
) -> Settings:
    """How a server is to be started."""
    return Settings(
        checkpoint=str(folder),
        converted=str(asked.cache.resolve() / "converted" / standing.server.peer.name / f"{folder.name}-bf16"),
        weights="bf16",
        threads=asked.threads,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        kv_bytes=dimensions.kv_bytes(MAX_MODEL_LEN * max_num_seqs),
    )


def run_one(
    asked: argparse.Namespace, results: Results, standing: _Standing, dimensions: Dimensions, folder: Path
) -> Search:
    """Start one server, search, and end it. Raises ServerError, EngineError."""
    name, model, cache = standing.server.name, dimensions.name, asked.cache.resolve()
    load, before = results.loads[model], results.of(model, name)
    settings = settings_of(asked, standing, dimensions, folder, load.max_num_seqs)
    convert(standing.server, standing.python, cache, settings)
    known = [one.limit for one in before if one.limit is not None]
    start, step = (known[-1], NEXT_STEP) if known else (STARTS[model], FIRST_STEP)
    number = len(before) + 1
    with ServerProcess(standing.server, standing.python, cache, settings) as process:
        process.wait()
        first = warm_up(process.url, load)
        for other in results.searches:
            if other.model == model and other.first_prompt != first:
                found = f"{first:g} tokens, {other.server}'s {other.first_prompt:g}"
                raise ServerError(f"{name}: its first prompts have {found}, of the same text")

        def at(place: int) -> Point:
            try:
                point = measure(process.url, load, place, SEED * number + place)
            except EngineError as error:  # it may still be at what a rate before has left; whether it lives is told
                say(f"  {name}, {model}, round {number}: {rate_of(place):g} conversations/s: {error}; once more")
                process.wait()
                point = measure(process.url, load, place, SEED * number + place)
            found = point.figures
            told = f"p99 {found.get('ttft_ms_p99', 0):.0f} ms to the first token"
            told += f", {found.get('tpot_ms_p99', 0):.1f} a token, {found.get('output_tokens_per_s', 0):.0f} tokens/s"
            told = "; ".join([told, *point.faults])
            say(f"  {name}, {model}, round {number}: {rate_of(place):g} conversations/s: {told}")
            return point

        limit, points = search(at, start, step)
    return Search(model=model, server=name, round=number, first_prompt=first, limit=limit, points=points)


def measure_all(asked: argparse.Namespace, results: Results, target: Path) -> None:
    """All rounds; servers that cannot be had, or fail, are named in the result."""
    cache = asked.cache.resolve()
    names = chosen(asked.server, [*SERVERS, *NOT_HAD], "--server")
    models = chosen(asked.model, list(LOADS), "--model")
    folders = {model: checkpoint(MODELS[model], cache) for model in models}
    again = set(names) | {f"{name}, {model}" for name in names for model in models}
    results.left_out = [entry for entry in results.left_out if entry.what not in again]
    results.left_out += [LeftOut(name, NOT_HAD[name]) for name in names if name in NOT_HAD]
    standing = []
    for server in (SERVERS[name] for name in names if name in SERVERS):
        try:
            standing.append(_Standing(server, interpreter(server.peer, cache, asked.jobs)))
        except InstallError as error:
            say(f"{server.name}: {error} (all of it: {error.log})")
            results.left_out.append(LeftOut(server.name, str(error)))
            continue
        results.versions[server.name] = versions_of(standing[-1])
    for model in models:
        for _ in range(asked.rounds):
            for one in list(standing):
                try:
                    results.searches.append(run_one(asked, results, one, MODELS[model], folders[model]))
                except (ServerError, EngineError) as error:
                    say(f"{one.server.name}, {model}: {error}")
                    results.left_out.append(LeftOut(f"{one.server.name}, {model}", str(error)))
                    continue
                limit = results.searches[-1].limit
                kept = "no rate" if limit is None else f"{rate_of(limit):g} conversations/s"
                say(f"{one.server.name}, {model}: keeps the objective up to {kept}")
                results.save(target)
    results.left_out = list(dict.fromkeys(results.left_out))
    results.save(target)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit code."""
    asked = parser().parse_args(arguments)
    if min(asked.threads, asked.rounds + 1) < 1:
        raise SystemExit("--threads is at least 1, --rounds at least 0")
    loads = {model: load_of(asked, model) for model in chosen(asked.model, list(LOADS), "--model")}
    target = (
        asked.json or asked.cache.resolve() / "results" / f"servers-{datetime.datetime.now():%Y-%m-%dT%H-%M-%S}.json"
    )
    results = Results(commands=[], date="", threads=asked.threads, features=processor_features(), loads={})
    if target.exists():
        results = Results.load(target)
        if asked.rounds and (
            (results.threads, results.features) != (asked.threads, processor_features())
            or any(results.loads.get(m, load) != load for m, load in loads.items())
        ):
            raise SystemExit(
                f"--json {target}: it was measured under another load, with other threads, or on a processor with "
                f"other features ({', '.join(results.features) or 'none known'}); name another"
            )
    if asked.rounds:
        signal.signal(signal.SIGTERM, _end)  # so that the server is ended too
        say(f"results go to {target}")
        results.loads |= loads
        results.date = datetime.date.today().isoformat()
        results.commands = list(dict.fromkeys([*results.commands, command_of(asked)]))
        measure_all(asked, results, target)
    if asked.page is None:
        print(page(results, None), end="")
        return 0
    asked.page.parent.mkdir(parents=True, exist_ok=True)
    plot = asked.page.with_suffix(".svg")
    if results.searches:
        draw(results, plot)
    asked.page.write_text(page(results, plot.name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
