"""`engine bench latency | throughput | serve | speculation | kv`: how fast is it?"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from engine.plugin.card import Command
from engine.types.errors import ConfigError
from engine_bench.kinds import (
    Kind,
    add_count,
    add_kinds,
    add_lengths,
    add_number,
    at_least,
    check_temperature,
    run_kind,
    server_flags,
    settings_of,
)
from engine_bench.settings import BenchSettings
from engine_kit.flags import add_engine_flags, add_positional_model, add_settings

if TYPE_CHECKING:
    from engine.embedding import Merged
    from engine_bench.replay import ReplayOptions
    from engine_bench.report import Report


class Bench(Command):
    """Measure an engine, and print what it did beside what the machine can do."""

    help = "Measure latency, throughput, or a server under load."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_kinds(parser, _KINDS)

    def run(self, arguments: argparse.Namespace) -> int:
        return run_kind("engine", _KINDS, arguments)


# -- latency -----------------------------------------------------------------------------------------------------------
def _latency_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement")
    add_count(group, "--input-len", 128, "tokens of the prompt")
    add_count(group, "--output-len", 64, "tokens to generate, at least 2")
    add_count(group, "--repeats", 5, "measured streams, one after the other")
    add_count(group, "--warmup", 1, "streams before them", low=0)
    add_engine_flags(parser)


def _latency(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.latency import LatencyOptions, measure_latency

    names = ("input_len", "output_len", "repeats", "warmup")
    return measure_latency(settings_of(merged), LatencyOptions(**{name: getattr(arguments, name) for name in names}))


# -- throughput --------------------------------------------------------------------------------------------------------
def _throughput_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement", "lengths are drawn uniformly from LOW:HIGH; --seed seeds them")
    add_count(group, "--num-requests", 64, "requests, all queued at once")
    add_lengths(group, "32:256", "32:256")
    add_number(group, "--temperature", 0.6, "of the sampling")
    add_engine_flags(parser)


def _throughput(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.throughput import ThroughputOptions, measure_throughput
    from engine_bench.workload import Lengths

    check_temperature(arguments)
    options = ThroughputOptions(
        num_requests=arguments.num_requests,
        inputs=Lengths.parse(arguments.input_len, "--input-len"),
        outputs=Lengths.parse(arguments.output_len, "--output-len"),
        temperature=arguments.temperature,
    )
    return measure_throughput(settings_of(merged), options)


# -- serve -------------------------------------------------------------------------------------------------------------
def _serve_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement", "lengths are drawn uniformly from LOW:HIGH; --seed seeds all")
    group.add_argument("--url", metavar="URL", help="a running server (default: one is started for the measurement)")
    group.add_argument("--model-name", metavar="NAME", help="the model to ask --url for (default: its first)")
    add_number(group, "--rate", 4.0, "requests (or conversations) a second, arriving at random; inf sends all at once")
    add_number(group, "--burstiness", 1.0, "1 is Poisson, less comes in bursts, more comes evenly (a gamma's shape)")
    add_count(group, "--num-requests", 100, "requests to send; conversations, where these are replayed")
    add_lengths(group, "32:256", "16:128")
    group.add_argument("--slo-ttft", type=float, metavar="MS", help="goodput: a first token within this many ms")
    group.add_argument("--slo-itl", type=float, metavar="MS", help="goodput: a mean time between tokens within this")
    add_number(group, "--timeout", 600.0, "seconds that each request gets")
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
    replay.add_argument("--max-concurrency", type=at_least(1), metavar="N", help="most at once (default: no limit)")
    replay.add_argument(
        "--system-prompts", type=at_least(0), metavar="N", help="different ones, for --turns (default: 4)"
    )
    replay.add_argument("--system-words", type=at_least(1), metavar="N", help="of each, for --turns (default: 128)")
    add_settings(group, {"api_key": BenchSettings.declared["api_key"]})
    add_engine_flags(parser)


def _serve(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine.embedding import validated
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
    keys = validated(BenchSettings, merged).api_key or (None,)
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
        api_key=keys[0],
        model=getattr(arguments, "model_name", None),
        plot=getattr(arguments, "plot", None),
        seed=settings_of(merged).seed,
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


def _seconds(arguments: argparse.Namespace, name: str) -> float | None:
    value: float | None = getattr(arguments, name, None)
    return None if value is None else value / 1e3


# -- speculation -------------------------------------------------------------------------------------------------------
def _speculation_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement", "one stream, greedy, over prompts that come with this package")
    group.add_argument(
        "--draft", action="append", default=[], metavar="NAME,option=value,...",
        help="a drafter to measure, with options of its own; may be repeated; or none (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--num-tokens", default="2,4,8", metavar="N,...", help="numbers of drafts, but of trees (default: 2,4,8)"
    )
    group.add_argument(
        "--right", default="0.8", metavar="P,...",
        help="shares of right drafts, of a drafter that knows the answers and makes mistakes; or none (default: 0.8)",
    )  # fmt: skip
    add_count(group, "--output-len", 96, "tokens of an answer at most")
    group.add_argument("--plot", metavar="FILE", help="draw the speeds to this PNG (needs matplotlib)")
    add_engine_flags(parser)


def _speculation(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.speculation import SpeculationOptions, measure_speculation, parse_drafters

    numbers = _numbers(arguments.num_tokens, "--num-tokens", 1, 64)
    if not all(number.is_integer() for number in numbers):
        raise ConfigError(
            f"--num-tokens {arguments.num_tokens}", "drafts are whole", "write whole numbers from 1 to 64"
        )
    options = SpeculationOptions(
        drafters=parse_drafters(arguments.draft),
        num_tokens=sorted({int(number) for number in numbers}),
        right=[] if arguments.right == "none" else sorted(set(_numbers(arguments.right, "--right", 0, 1))),
        output_len=arguments.output_len,
        plot=getattr(arguments, "plot", None),
    )
    return measure_speculation(settings_of(merged), options)


def _numbers(text: str, flag: str, low: float, high: float) -> list[float]:
    """Read "0.5,0.8". Raises ConfigError naming the flag."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(low <= number <= high for number in found):
        raise ConfigError(f"{flag} {text}", "these are no such numbers", f"write numbers from {low} to {high}")
    return found


# -- kv ----------------------------------------------------------------------------------------------------------------
def _kv_flags(parser: argparse.ArgumentParser) -> None:
    add_positional_model(parser)
    group = parser.add_argument_group("measurement", "one stream, an engine for each tier, all open at once")
    group.add_argument(
        "--tiers",
        metavar="NAME,...",
        help="computed,device,blended,host,file,redis,tcp,tcp-push (default: all that there are)",
    )
    add_count(group, "--prompt-len", 2048, "tokens of a prompt whose keys and values are kept")
    add_count(group, "--question-len", 16, "tokens behind them, others each time")
    add_count(group, "--turns", 5, "turns in which everything is measured once")
    add_number(group, "--max-seconds", 600.0, "seconds after which no further turn begins")
    group.add_argument("--redis-url", default="redis://localhost:6379/0", metavar="URL", help="of the Redis server")
    add_engine_flags(parser)


def _kv(arguments: argparse.Namespace, merged: Merged) -> Report:
    from engine_bench.kv import KVOptions, measure_kv

    tiers = getattr(arguments, "tiers", None)
    names = ("prompt_len", "question_len", "turns", "max_seconds", "redis_url")
    options = KVOptions(tiers=tiers and tiers.split(","), **{name: getattr(arguments, name) for name in names})
    return measure_kv(settings_of(merged), options)


_KINDS = {
    "latency": Kind(_latency, _latency_flags, "one stream at a time: time to first token, time per token"),
    "throughput": Kind(_throughput, _throughput_flags, "a whole batch offline: requests and tokens per second"),
    "serve": Kind(_serve, _serve_flags, "a server under load that does not wait for it (open loop)"),
    "speculation": Kind(_speculation, _speculation_flags, "what each drafter brings: acceptance, cost, tokens/s"),
    "kv": Kind(_kv, _kv_flags, "time to first token of prompts whose KV cache is kept, by where"),
}
