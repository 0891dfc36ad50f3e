"""`engine bench latency | throughput | serve | api | overhead | scheduler | ...`: how fast is it?"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.embedding import (
    EngineSettings,
    add_engine_flags,
    add_positional_model,
    add_settings,
    command_settings,
    name_positional_model,
)
from engine.plugin.card import Command
from engine.plugin.points import POINTS
from engine.types.errors import ConfigError
from engine_bench.settings import BenchSettings

if TYPE_CHECKING:
    from engine.embedding import EngineConfig, Merged
    from engine_bench.replay import ReplayOptions
    from engine_bench.report import Report

_PREFIX = "engine."


class Bench(Command):
    """Measure an engine, and print what it did beside what the machine can do."""

    help = "Measure latency, throughput, serving, the server's and the engine's own work, evictors, or routers."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
        for name, (_, declare, text) in _KINDS.items():
            kind = kinds.add_parser(
                name, help=text, description=text, allow_abbrev=False, argument_default=argparse.SUPPRESS
            )
            kind.add_argument(
                "--json", action="store_true", default=False, help="print the figures as one object on the last line"
            )
            declare(kind)

    def run(self, arguments: argparse.Namespace) -> int:
        measure = _KINDS[arguments.kind][0]
        name_positional_model(arguments, "measure")
        merged = command_settings(arguments)
        report = measure(arguments, merged)
        command = shlex.join(["engine", *sys.argv[1:]])
        report.figures = {**report.figures, "command": command}
        print(f"$ {command}")
        report.write(sys.stdout, arguments.json)
        return 1 if report.figures.get("completed") == 0 else 0


# -- latency -----------------------------------------------------------------------------------------------------------
def _latency_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement")
    _count(group, "--input-len", 128, "tokens of the prompt")
    _count(group, "--output-len", 64, "tokens to generate, at least 2")
    _count(group, "--repeats", 5, "measured streams, one after the other")
    _count(group, "--warmup", 1, "streams before them", low=0)
    add_engine_flags(parser)


def _latency(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.latency import LatencyOptions, measure_latency

    names = ("input_len", "output_len", "repeats", "warmup")
    return measure_latency(_config(merged), LatencyOptions(**{name: getattr(arguments, name) for name in names}))


# -- throughput --------------------------------------------------------------------------------------------------------
def _throughput_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement", "lengths are drawn uniformly from LOW:HIGH; --seed seeds them")
    _count(group, "--num-requests", 64, "requests, all queued at once")
    _lengths(group, "32:256", "32:256")
    _number(group, "--temperature", 0.6, "of the sampling")
    add_engine_flags(parser)


def _throughput(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.throughput import ThroughputOptions, measure_throughput
    from engine_bench.workload import Lengths

    _check_temperature(arguments)
    options = ThroughputOptions(
        num_requests=arguments.num_requests,
        inputs=Lengths.parse(arguments.input_len, "--input-len"),
        outputs=Lengths.parse(arguments.output_len, "--output-len"),
        temperature=arguments.temperature,
    )
    return measure_throughput(_config(merged), options)


# -- serve -------------------------------------------------------------------------------------------------------------
def _serve_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement", "lengths are drawn uniformly from LOW:HIGH; --seed seeds all")
    group.add_argument("--url", metavar="URL", help="a running server (default: one is started for the measurement)")
    group.add_argument("--model-name", metavar="NAME", help="the model to ask --url for (default: its first)")
    _number(group, "--rate", 4.0, "requests (or conversations) a second, arriving at random; inf sends all at once")
    _number(group, "--burstiness", 1.0, "1 is Poisson, less comes in bursts, more comes evenly (a gamma's shape)")
    _count(group, "--num-requests", 100, "requests to send; conversations, where these are replayed")
    _lengths(group, "32:256", "16:128")
    group.add_argument("--slo-ttft", type=float, metavar="MS", help="goodput: a first token within this many ms")
    group.add_argument("--slo-itl", type=float, metavar="MS", help="goodput: a mean time between tokens within this")
    _number(group, "--timeout", 600.0, "seconds that each request gets")
    group.add_argument("--plot", metavar="FILE", help="draw the distributions to this PNG (needs matplotlib)")
    replay = parser.add_argument_group(
        "conversations",
        "instead of single requests: each turn is sent when the one before is answered, with all before it",
    )
    replay.add_argument(
        "--conversations", metavar="FILE", help="replay these: JSON or JSONL, ShareGPT's form or messages"
    )
    replay.add_argument(
        "--turns", metavar="LOW:HIGH", help="draw conversations of so many turns; --input-len counts words"
    )
    replay.add_argument(
        "--think-time", type=float, metavar="S", help="mean seconds before each further turn (default: 1)"
    )
    replay.add_argument("--max-concurrency", type=_at_least(1), metavar="N", help="most at once (default: no limit)")
    replay.add_argument(
        "--system-prompts", type=_at_least(0), metavar="N", help="different ones, for --turns (default: 4)"
    )
    replay.add_argument("--system-words", type=_at_least(1), metavar="N", help="of each, for --turns (default: 128)")
    add_settings(group, {"api_key": BenchSettings.declared["api_key"]})
    add_engine_flags(parser)


def _serve(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.serve import ServeOptions, measure_serve
    from engine_bench.workload import Lengths

    for name in ("rate", "burstiness", "timeout", "slo_ttft", "slo_itl"):
        value = getattr(arguments, name, 1.0)
        if not value > 0 or (value == math.inf and name != "rate"):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}", "it is out of range", "give a number above 0")
    url = getattr(arguments, "url", None)
    flags = server_flags(arguments)
    given = [flag for flag in flags if not flag.startswith(("--api-key=", "--seed="))]
    if url is not None and given:
        raise ConfigError(
            f"measure {url} with {given[0]}", "that server has its own settings", "leave out --url or the flag"
        )
    if url is None and hasattr(arguments, "model_name"):
        raise ConfigError("--model-name without --url", "it is for servers that run already", "name the --model")
    options = ServeOptions(
        url=url,
        rate=arguments.rate,
        burstiness=arguments.burstiness,
        num_requests=arguments.num_requests,
        inputs=Lengths.parse(arguments.input_len, "--input-len"),
        outputs=Lengths.parse(arguments.output_len, "--output-len"),
        slo_ttft=_seconds(arguments, "slo_ttft"),
        slo_itl=_seconds(arguments, "slo_itl"),
        timeout=arguments.timeout,
        api_key=merged.section("server").get("api_key"),
        model=getattr(arguments, "model_name", None),
        plot=getattr(arguments, "plot", None),
        seed=_config(merged).seed,
    )
    replay = _replay(arguments)
    if replay is None:
        return measure_serve(options, flags)
    from engine_bench.replay import measure_replay

    return measure_replay(options, replay, flags)


def _replay(arguments: argparse.Namespace) -> ReplayOptions | None:
    """What is said of conversations; None for nothing. Raises ConfigError for what contradicts each other."""
    from engine_bench.replay import ReplayOptions
    from engine_bench.workload import Lengths

    file, turns = getattr(arguments, "conversations", None), getattr(arguments, "turns", None)
    drawn = [name for name in ("system_prompts", "system_words") if hasattr(arguments, name)]
    given = [name for name in ("think_time", "max_concurrency") if hasattr(arguments, name)] + drawn
    wrong = given if file is None and turns is None else [*(["turns"] if turns else []), *drawn] if file else []
    if wrong:
        flag = f"--{wrong[0].replace('_', '-')}"
        found = "a file says what is in its conversations" if file else "no conversations are replayed"
        raise ConfigError(flag, found, f"leave out {flag}" + ("" if file else ", or add --conversations or --turns"))
    if file is None and turns is None:
        return None
    think_time = getattr(arguments, "think_time", 1.0)
    if not 0 <= think_time < math.inf:
        raise ConfigError(f"--think-time {think_time:g}", "it is out of range", "give seconds, or 0")
    return ReplayOptions(
        file=file,
        turns=Lengths.parse(turns or "1", "--turns"),
        system_prompts=getattr(arguments, "system_prompts", 4),
        system_words=getattr(arguments, "system_words", 128),
        think_time=think_time,
        max_concurrency=getattr(arguments, "max_concurrency", None),
    )


def server_flags(arguments: argparse.Namespace) -> list[str]:
    """The engine's and the server's flags of a parsed command line, as flags again."""
    flag_of = {"config": "--config", "options": "--option"}
    flag_of |= {
        setting.name: setting.flag for setting in (*EngineSettings.declared.values(), *BenchSettings.declared.values())
    }
    flag_of |= {point.keyword: point.option_flag for point in POINTS.values()}
    flags: list[str] = []
    for dest, value in vars(arguments).items():
        if not dest.startswith(_PREFIX):
            continue
        flag = flag_of[dest.removeprefix(_PREFIX)]
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            flags += [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]
    return flags


def _seconds(arguments: argparse.Namespace, name: str) -> float | None:
    value: float | None = getattr(arguments, name, None)
    return None if value is None else value / 1e3


# -- api ---------------------------------------------------------------------------------------------------------------
def _api_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement", "of the model only tokenizer and chat template are used")
    _count(group, "--connections", 256, "streams at once")
    _count(group, "--output-len", 1000, "tokens of each stream")
    _count(group, "--clients", 2, "processes that read them")
    _count(group, "--repeats", 3, "of each load")
    _number(group, "--rate", 40000.0, "tokens a second of the first load; the second has as many as there can be")
    _count(group, "--requests", 300, "requests one after the other, for the time to first token")
    group.add_argument(
        "--route", choices=("chat", "completions"), default="chat", help="what is asked (default: %(default)s)"
    )
    add_settings(group, {"api_workers": BenchSettings.declared["api_workers"]})
    add_engine_flags(parser)


def _api(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.api import ApiOptions, measure_api

    if not 0 < arguments.rate < math.inf:
        raise ConfigError(f"--rate {arguments.rate:g}", "it is out of range", "give a number above 0")
    names = ("connections", "output_len", "clients", "repeats", "rate", "requests", "route")
    options = ApiOptions(**{name: getattr(arguments, name) for name in names})
    return measure_api(_config(merged), options, server_flags(arguments))


# -- scheduler ---------------------------------------------------------------------------------------------------------
def _scheduler_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--all", action="store_true", default=False,
        help="one table of all: 1 and 256 running, a long queue, drafts, and the KV manager's parts",
    )  # fmt: skip
    group.add_argument("--running", type=_at_least(1), metavar="N", help="requests that decode (default: 256)")
    group.add_argument("--waiting", type=_at_least(0), metavar="N", help="requests behind them (default: 0)")
    _count(group, "--steps", 1000, "steps to measure, at least 2", low=2)
    _count(group, "--input-len", 128, "tokens of a prompt (and up to a block more)")
    _null_core_flags(parser, group)


def _null_core_flags(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """What the engine core without a model is made of."""
    group.add_argument(
        "--drafts", type=_at_least(0), metavar="N",
        help="drafts of each request in each step, half of which are accepted (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--kv-groups", type=int, choices=(1, 2, 3), metavar="N",
        help="1: full attention; 2: sliding windows too; 3: a drafter's layers too (default: 1)",
    )  # fmt: skip
    drivers = parser.add_argument_group("drivers", "options of a driver: --POINT.OPTION VALUE")
    for name in ("evictor", "scheduling_policy"):
        point = POINTS[name]
        drivers.add_argument(point.option_flag, metavar="DRIVER", dest=_PREFIX + point.keyword, help=point.help)
    drivers.add_argument("--block-size", metavar="N", dest=_PREFIX + "block_size", help="tokens in a block")
    drivers.add_argument("--seed", metavar="N", dest=_PREFIX + "seed", help="of the prompts")
    drivers.add_argument("--option", action="append", dest=_PREFIX + "options", help=argparse.SUPPRESS)


def _scheduler(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.scheduler import SchedulerOptions, measure_scheduler
    from engine_bench.scheduler_all import measure_all

    names = ("running", "waiting", "drafts", "kv_groups")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if not arguments.all:
        defaults = {"running": 256, "waiting": 0}
        options = SchedulerOptions(steps=arguments.steps, input_len=arguments.input_len, **(defaults | given))
        return measure_scheduler(_config(merged), options)
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(f"--all with {flag}", "it measures a set of its own", f"leave out {flag} or --all")
    return measure_all(_config(merged), arguments.steps, arguments.input_len)


# -- soak --------------------------------------------------------------------------------------------------------------
def _soak_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement", "lengths, shared prefixes and aborts are drawn from --seed")
    _count(group, "--requests", 100_000, "requests in all", low=10)
    _count(group, "--running", 256, "slots; as many more requests wait")
    _null_core_flags(parser, group)


def _soak(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.soak import SoakOptions, run_soak

    names = ("requests", "running", "drafts", "kv_groups")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return run_soak(_config(merged), SoakOptions(**given))


# -- overhead ----------------------------------------------------------------------------------------------------------
def _overhead_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement")
    _count(group, "--running", 1, "requests that decode")
    _count(group, "--steps", 200, "steps to measure")
    _count(group, "--input-len", 32, "tokens of a prompt")
    _number(group, "--temperature", 0.6, "of the sampling")
    add_engine_flags(parser)


def _overhead(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.overhead import OverheadOptions, measure_overhead

    _check_temperature(arguments)
    names = ("running", "steps", "input_len", "temperature")
    return measure_overhead(_config(merged), OverheadOptions(**{name: getattr(arguments, name) for name in names}))


# -- overlap -----------------------------------------------------------------------------------------------------------
def _overlap_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    _count(group, "--running", 256, "requests that decode")
    _count(group, "--constrained", 0, "of these, under a constraint: a choice of long texts", low=0)
    _number(group, "--step-ms", 2.0, "milliseconds that the simulated device takes for a step")
    _count(group, "--steps", 300, "steps of a round")
    _count(group, "--rounds", 5, "of which the best and the median are told")
    _count(group, "--input-len", 32, "tokens of a prompt")
    group.add_argument("--in-flight", metavar="N", dest=_PREFIX + "in_flight", help="most steps under way at once")
    point = POINTS["grammar"]
    group.add_argument(point.option_flag, metavar="DRIVER", dest=_PREFIX + point.keyword, help=point.help)


def _overlap(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.overlap import OverlapOptions, measure_overlap

    if not 0 < arguments.step_ms < math.inf:
        raise ConfigError(f"--step-ms {arguments.step_ms:g}", "it is out of range", "give a number above 0")
    if arguments.constrained > arguments.running:
        raise ConfigError(
            f"--constrained {arguments.constrained}", f"only {arguments.running} are running", "constrain fewer"
        )
    names = ("running", "constrained", "step_ms", "steps", "rounds", "input_len")
    return measure_overlap(_config(merged), OverlapOptions(**{name: getattr(arguments, name) for name in names}))


# -- eviction ----------------------------------------------------------------------------------------------------------
def _eviction_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement", "the trace: tenants with system prompts, conversations of turns")
    group.add_argument("--drivers", metavar="NAME,...", help="evictors to compare (default: all that are installed)")
    group.add_argument(
        "--pages", default="300,600,1200,2400,4800", metavar="N,...", help="cache sizes (default: %(default)s)"
    )
    _trace_flags(group)


def _trace_flags(group: argparse._ArgumentGroup) -> None:
    _count(group, "--tenants", 24, "system prompts")
    _count(group, "--conversations", 600, "of 4 turns on average")
    _count(group, "--system-blocks", 24, "blocks of the longest system prompt")
    group.add_argument("--seed", metavar="N", dest=_PREFIX + "seed", help="of the trace")


def _eviction(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.eviction import EvictionOptions, measure_eviction

    try:
        sizes = tuple(int(size) for size in arguments.pages.split(","))
    except ValueError as error:
        raise ConfigError(f"--pages {arguments.pages}", str(error), "give numbers, as in 300,600") from error
    drivers = getattr(arguments, "drivers", None)
    options = EvictionOptions(
        drivers=tuple(drivers.split(",")) if drivers else (),
        sizes=sizes,
        tenants=arguments.tenants,
        conversations=arguments.conversations,
        blocks_of_system=arguments.system_blocks,
        seed=_config(merged).seed,
    )
    return measure_eviction(options, merged.plugin_list)


# -- routing -----------------------------------------------------------------------------------------------------------
def _routing_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement", "the trace is that of eviction, the ranks are simulated")
    group.add_argument("--routers", metavar="NAME,...", help="routers to compare (default: all that are installed)")
    _count(group, "--ranks", 4, "engine cores, at least 2", low=2)
    _count(group, "--pages", 600, "pages of each rank's cache")
    _number(group, "--load", 1.0, "how busy prompts would keep the ranks if no prefix were found; 1 is all of the time")
    _trace_flags(group)
    point = POINTS["evictor"]
    group.add_argument(point.option_flag, metavar="DRIVER", dest=_PREFIX + point.keyword, help="of each rank's cache")


def _routing(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.routing import RoutingOptions, measure_routing

    if not 0 < arguments.load < math.inf:
        raise ConfigError(f"--load {arguments.load:g}", "it is out of range", "give a number above 0")
    config = _config(merged)
    routers = getattr(arguments, "routers", None)
    options = RoutingOptions(
        routers=tuple(routers.split(",")) if routers else (),
        ranks=arguments.ranks,
        pages=arguments.pages,
        load=arguments.load,
        tenants=arguments.tenants,
        conversations=arguments.conversations,
        blocks_of_system=arguments.system_blocks,
        seed=config.seed,
    )
    return measure_routing(config, options)


# -- what they share ---------------------------------------------------------------------------------------------------
def _config(merged: Merged) -> EngineConfig:
    from engine.embedding import EngineConfig

    return EngineConfig.from_merged(merged)


def _check_temperature(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.temperature < math.inf:
        raise ConfigError(f"--temperature {arguments.temperature}", "it is out of range", "give 0 or more")


def _at_least(low: int) -> Callable[[str], int]:
    def count(value: str) -> int:
        number = int(value)
        if number < low:
            raise argparse.ArgumentTypeError(f"{number} is below {low}")
        return number

    return count


def _count(group: argparse._ArgumentGroup, flag: str, default: int, text: str, low: int = 1) -> None:
    group.add_argument(flag, type=_at_least(low), default=default, metavar="N", help=f"{text} (default: {default})")


def _number(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    group.add_argument(flag, type=float, default=default, metavar="X", help=f"{text} (default: {default:g})")


def _lengths(group: argparse._ArgumentGroup, inputs: str, outputs: str) -> None:
    for flag, default, text in (("--input-len", inputs, "of a prompt"), ("--output-len", outputs, "to generate")):
        group.add_argument(flag, default=default, metavar="N|LOW:HIGH", help=f"tokens {text} (default: {default})")


_Measure = Callable[[argparse.Namespace, Any], "Report"]
_KINDS: dict[str, tuple[_Measure, Callable[[argparse.ArgumentParser], None], str]] = {
    "latency": (_latency, _latency_flags, "one stream at a time: time to first token, time per token"),
    "throughput": (_throughput, _throughput_flags, "a whole batch offline: requests and tokens per second"),
    "serve": (_serve, _serve_flags, "a server under load that does not wait for it (open loop)"),
    "api": (_api, _api_flags, "what the server costs, where the engine's tokens are there at once"),
    "overhead": (_overhead, _overhead_flags, "which part of a step is spent outside the executor"),
    "scheduler": (_scheduler, _scheduler_flags, "the engine core's own work in a step, without a model"),
    "soak": (_soak, _soak_flags, "a great many requests through an engine core without a model: is anything lost?"),
    "overlap": (_overlap, _overlap_flags, "how much of a device's time the engine's own work leaves unused"),
    "eviction": (_eviction, _eviction_flags, "hit rates of the evictors on a trace, beside the optimum"),
    "routing": (_routing, _routing_flags, "hit rates and balance of the routers on a trace, over simulated ranks"),
}
"""What can be measured: how, its flags, and its line in the help."""
