"""What the engine's insides do: `python -m tests.benchmarks KIND`, from the top of the repository.

These import the engine's loop, KV cache and scheduler, which nothing that is installed may: what users measure is
`engine bench`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.cli.main import canonical
from engine.plugin.points import POINTS
from engine.types.errors import ConfigError, EngineError
from engine_bench.kinds import (
    PREFIX,
    Kind,
    add_count,
    add_kinds,
    add_number,
    at_least,
    check_temperature,
    run_kind,
    server_flags,
    settings_of,
)
from engine_kit.flags import add_engine_flags, add_positional_model

if TYPE_CHECKING:
    from engine.embedding import Merged
    from engine_bench.report import Report

PROGRAM = "python -m tests.benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print; the answer is the exit code: 2 for what the user can mend, as of `engine`."""
    try:
        return run_kind(PROGRAM, KINDS, parser().parse_args(canonical(sys.argv[1:] if argv is None else argv)))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The flags of all kinds."""
    made = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add_kinds(made, KINDS)
    return made


# -- api ---------------------------------------------------------------------------------------------------------------
def _api_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement", "of the model only tokenizer and chat template are used")
    add_count(group, "--connections", 256, "streams at once")
    add_count(group, "--output-len", 1000, "tokens of each stream")
    add_count(group, "--clients", 2, "processes that read them")
    add_count(group, "--repeats", 3, "of each load")
    add_number(group, "--rate", 40000.0, "tokens a second of the first load; the second has as many as there can be")
    add_count(group, "--requests", 300, "requests one after the other, for the time to first token")
    group.add_argument(
        "--route", choices=("chat", "completions"), default="chat", help="what is asked (default: %(default)s)"
    )
    add_count(group, "--api-workers", 1, "API processes of the server that is measured")
    add_engine_flags(parser)


def _api(arguments: argparse.Namespace, merged: Merged) -> Report:
    from tests.benchmarks.api import ApiOptions, measure_api

    if not 0 < arguments.rate < math.inf:
        raise ConfigError(f"--rate {arguments.rate:g}", "it is out of range", "give a number above 0")
    names = ("connections", "output_len", "clients", "repeats", "rate", "requests", "route")
    options = ApiOptions(**{name: getattr(arguments, name) for name in names})
    flags = [*server_flags(arguments), f"--api-workers={arguments.api_workers}"]
    return measure_api(settings_of(merged), options, flags)


# -- start -------------------------------------------------------------------------------------------------------------
def _start_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement")
    add_count(group, "--repeats", 5, "runs of `engine generate`, after one that is not counted")
    add_count(group, "--output-len", 16, "tokens of each")
    add_engine_flags(parser)


def _start(arguments: argparse.Namespace, merged: Merged) -> Report:
    from tests.benchmarks.start import StartOptions, measure_start

    settings_of(merged)
    options = StartOptions(repeats=arguments.repeats, output_len=arguments.output_len)
    return measure_start(options, server_flags(arguments))


# -- scheduler ---------------------------------------------------------------------------------------------------------
def _scheduler_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--all", action="store_true", default=False,
        help="one table of all: 1 and 256 running, a long queue, drafts, and the KV manager's parts",
    )  # fmt: skip
    group.add_argument("--running", type=at_least(1), metavar="N", help="requests that decode (default: 256)")
    group.add_argument("--waiting", type=at_least(0), metavar="N", help="requests behind them (default: 0)")
    add_count(group, "--steps", 1000, "steps to measure, at least 2", low=2)
    add_count(group, "--input-len", 128, "tokens of a prompt (and up to a block more)")
    _null_core_flags(parser, group)


def _null_core_flags(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """What the engine core without a model is made of."""
    group.add_argument(
        "--drafts", type=at_least(0), metavar="N",
        help="drafts of each request in each step, half of which are accepted (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--kv-tables", type=int, choices=(1, 2, 3), metavar="N",
        help="1: full attention; 2: sliding windows too; 3: twice as many of these (default: 1)",
    )  # fmt: skip
    drivers = parser.add_argument_group("drivers", "options of a driver: --POINT.OPTION VALUE")
    for name in ("evictor", "scheduling_policy"):
        point = POINTS[name]
        drivers.add_argument(point.option_flag, metavar="DRIVER", dest=PREFIX + point.keyword, help=point.help)
    drivers.add_argument("--block-size", metavar="N", dest=PREFIX + "block_size", help="tokens in a block")
    drivers.add_argument("--seed", metavar="N", dest=PREFIX + "seed", help="of the prompts")
    drivers.add_argument("--option", action="append", dest=PREFIX + "options", help=argparse.SUPPRESS)


def _scheduler(arguments: argparse.Namespace, merged: Merged) -> Report:
    from tests.benchmarks.scheduler import SchedulerOptions, measure_scheduler
    from tests.benchmarks.scheduler_all import measure_all

    names = ("running", "waiting", "drafts", "kv_tables")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if not arguments.all:
        defaults = {"running": 256, "waiting": 0}
        options = SchedulerOptions(steps=arguments.steps, input_len=arguments.input_len, **(defaults | given))
        return measure_scheduler(settings_of(merged), options)
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(f"--all with {flag}", "it measures a set of its own", f"leave out {flag} or --all")
    return measure_all(settings_of(merged), arguments.steps, arguments.input_len)


# -- soak --------------------------------------------------------------------------------------------------------------
def _soak_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement", "lengths, shared prefixes and aborts are drawn from --seed")
    add_count(group, "--requests", 100_000, "requests in all", low=10)
    add_count(group, "--running", 256, "slots; as many more requests wait")
    _null_core_flags(parser, group)


def _soak(arguments: argparse.Namespace, merged: Merged) -> Report:
    from tests.benchmarks.soak import SoakOptions, run_soak

    names = ("requests", "running", "drafts", "kv_tables")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return run_soak(settings_of(merged), SoakOptions(**given))


# -- overhead ----------------------------------------------------------------------------------------------------------
def _overhead_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement")
    add_count(group, "--running", 1, "requests that decode")
    add_count(group, "--steps", 200, "steps to measure")
    add_count(group, "--input-len", 32, "tokens of a prompt")
    add_number(group, "--temperature", 0.6, "of the sampling")
    group.add_argument(
        "--filled", action="store_true", default=False,
        help="prompts are not computed: their pages are filled with bytes, since decoding costs the same",
    )  # fmt: skip
    add_engine_flags(parser)


def _overhead(arguments: argparse.Namespace, merged: Merged) -> Report:
    from tests.benchmarks.overhead import OverheadOptions, measure_overhead

    check_temperature(arguments)
    names = ("running", "steps", "input_len", "temperature", "filled")
    return measure_overhead(settings_of(merged), OverheadOptions(**{name: getattr(arguments, name) for name in names}))


# -- overlap -----------------------------------------------------------------------------------------------------------
def _overlap_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    add_count(group, "--running", 256, "requests that decode")
    add_count(group, "--constrained", 0, "of these, under a constraint: a choice of long texts", low=0)
    add_number(group, "--step-ms", 2.0, "milliseconds that the simulated device takes for a step")
    add_count(group, "--steps", 300, "steps of a round")
    add_count(group, "--rounds", 5, "of which the best and the median are told")
    add_count(group, "--input-len", 32, "tokens of a prompt")
    group.add_argument("--in-flight", metavar="N", dest=PREFIX + "in_flight", help="most steps under way at once")
    point = POINTS["grammar"]
    group.add_argument(point.option_flag, metavar="DRIVER", dest=PREFIX + point.keyword, help=point.help)


def _overlap(arguments: argparse.Namespace, merged: Merged) -> Report:
    from tests.benchmarks.overlap import OverlapOptions, measure_overlap

    if not 0 < arguments.step_ms < math.inf:
        raise ConfigError(f"--step-ms {arguments.step_ms:g}", "it is out of range", "give a number above 0")
    if arguments.constrained > arguments.running:
        raise ConfigError(
            f"--constrained {arguments.constrained}", f"only {arguments.running} are running", "constrain fewer"
        )
    names = ("running", "constrained", "step_ms", "steps", "rounds", "input_len")
    return measure_overlap(settings_of(merged), OverlapOptions(**{name: getattr(arguments, name) for name in names}))


# -- eviction ----------------------------------------------------------------------------------------------------------
def _eviction_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement", "the trace: tenants with system prompts, conversations of turns")
    group.add_argument("--drivers", metavar="NAME,...", help="evictors to compare (default: all that are installed)")
    group.add_argument(
        "--pages", default="300,600,1200,2400,4800", metavar="N,...", help="cache sizes (default: %(default)s)"
    )
    _trace_flags(group)


def _trace_flags(group: argparse._ArgumentGroup) -> None:
    add_count(group, "--tenants", 24, "system prompts")
    add_count(group, "--conversations", 600, "of 4 turns on average")
    add_count(group, "--system-blocks", 24, "blocks of the longest system prompt")
    group.add_argument("--seed", metavar="N", dest=PREFIX + "seed", help="of the trace")


def _eviction(arguments: argparse.Namespace, merged: Merged) -> Report:
    from tests.benchmarks.eviction import EvictionOptions, measure_eviction

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
        seed=settings_of(merged).seed,
    )
    return measure_eviction(options, merged.plugin_list)


# -- routing -----------------------------------------------------------------------------------------------------------
def _routing_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement", "the trace is that of eviction, the ranks are simulated")
    group.add_argument("--routers", metavar="NAME,...", help="routers to compare (default: all that are installed)")
    add_count(group, "--ranks", 4, "engine cores, at least 2", low=2)
    add_count(group, "--pages", 600, "pages of each rank's cache")
    add_number(
        group, "--load", 1.0, "how busy prompts would keep the ranks if no prefix were found; 1 is all of the time"
    )
    _trace_flags(group)
    point = POINTS["evictor"]
    group.add_argument(point.option_flag, metavar="DRIVER", dest=PREFIX + point.keyword, help="of each rank's cache")


def _routing(arguments: argparse.Namespace, merged: Merged) -> Report:
    from tests.benchmarks.routing import RoutingOptions, measure_routing

    if not 0 < arguments.load < math.inf:
        raise ConfigError(f"--load {arguments.load:g}", "it is out of range", "give a number above 0")
    config = settings_of(merged)
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


KINDS = {
    "api": Kind(_api, _api_flags, "what the server costs, where the engine's tokens are there at once"),
    "start": Kind(_start, _start_flags, "how long until the first text, and what a server at rest holds"),
    "overhead": Kind(_overhead, _overhead_flags, "which part of a step is spent outside the executor"),
    "scheduler": Kind(_scheduler, _scheduler_flags, "the engine core's own work in a step, without a model"),
    "soak": Kind(_soak, _soak_flags, "a great many requests through an engine core: is anything lost?"),
    "overlap": Kind(_overlap, _overlap_flags, "how much of a device's time the engine's own work leaves unused"),
    "eviction": Kind(_eviction, _eviction_flags, "hit rates of the evictors on a trace, beside the optimum"),
    "routing": Kind(_routing, _routing_flags, "hit rates and balance of the routers on a trace, over simulated ranks"),
}


if __name__ == "__main__":
    raise SystemExit(main())
