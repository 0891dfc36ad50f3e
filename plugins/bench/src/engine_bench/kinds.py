"""Kinds of measurements, as a command line has them: their flags, and what each prints. `engine bench` has some, and so
has the project's own `python -m tests.benchmarks`."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.embedding import EngineSettings
from engine.plugin.points import POINTS
from engine.types.errors import ConfigError
from engine_bench.settings import BenchSettings
from engine_kit.flags import command_settings, name_positional_model

if TYPE_CHECKING:
    from engine.embedding import EngineConfig, Merged
    from engine_bench.report import Report

PREFIX = "engine."
"""Of what the flags of settings are called in a namespace."""


class Kind(NamedTuple):
    """What can be measured: how, its flags, and its line in the help."""

    measure: Callable[[argparse.Namespace, Merged], Report]
    declare: Callable[[argparse.ArgumentParser], None]
    help: str


def add_kinds(parser: argparse.ArgumentParser, kinds: Mapping[str, Kind]) -> None:
    """Give each kind a parser below this one."""
    parsers = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in kinds.items():
        one = parsers.add_parser(
            name, help=kind.help, description=kind.help, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        one.add_argument(
            "--json", action="store_true", default=False, help="print the figures as one object on the last line"
        )
        kind.declare(one)


def run_kind(program: str, kinds: Mapping[str, Kind], arguments: argparse.Namespace) -> int:
    """Measure, and print the command and the report; the exit code. Raises the measurement's errors."""
    name_positional_model(arguments, "measure")
    report = kinds[arguments.kind].measure(arguments, command_settings(arguments))
    command = f"{program} {shlex.join(_without_secrets(sys.argv[1:], arguments))}"
    report.figures = {**report.figures, "command": command}
    print(f"$ {command}")
    report.write(sys.stdout, arguments.json)
    return 1 if report.figures.get("completed") == 0 else 0


def _without_secrets(argv: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    """What was typed, with stars in place of keys: reports are kept and shown."""
    names = [PREFIX + setting.name for setting in BenchSettings.declared.values() if setting.secret]
    secrets = {value for name in names for value in getattr(arguments, name, ())}
    typed = [(part, *part.partition("=")) for part in argv]
    return ["***" if part in secrets else f"{flag}=***" if value in secrets else part for part, flag, _, value in typed]


def server_flags(arguments: argparse.Namespace) -> list[str]:
    """The engine's flags of a parsed command line, and the key of a server, as flags again."""
    flag_of = {"config": "--config", "options": "--option"}
    flag_of |= {
        setting.name: setting.flag for setting in (*EngineSettings.declared.values(), *BenchSettings.declared.values())
    }
    flag_of |= {point.keyword: point.option_flag for point in POINTS.values()}
    flags: list[str] = []
    for dest, value in vars(arguments).items():
        if not dest.startswith(PREFIX):
            continue
        flag = flag_of[dest.removeprefix(PREFIX)]
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            flags += [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]
    return flags


def settings_of(merged: Merged) -> EngineConfig:
    """The engine's, validated."""
    from engine.embedding import EngineConfig

    return EngineConfig.from_merged(merged)


def check_temperature(arguments: argparse.Namespace) -> None:
    """Raise ConfigError where it is none."""
    if not 0 <= arguments.temperature < math.inf:
        raise ConfigError(f"--temperature {arguments.temperature}", "it is out of range", "give 0 or more")


def at_least(low: int) -> Callable[[str], int]:
    """The type of a flag whose value is a number, and not below `low`."""

    def count(value: str) -> int:
        number = int(value)
        if number < low:
            raise argparse.ArgumentTypeError(f"{number} is below {low}")
        return number

    return count


def add_count(group: argparse._ArgumentGroup, flag: str, default: int, text: str, low: int = 1) -> None:
    """A flag of a whole number, at least `low`."""
    group.add_argument(flag, type=at_least(low), default=default, metavar="N", help=f"{text} (default: {default})")


def add_number(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    """A flag of any number."""
    group.add_argument(flag, type=float, default=default, metavar="X", help=f"{text} (default: {default:g})")


def add_lengths(group: argparse._ArgumentGroup, inputs: str, outputs: str) -> None:
    """--input-len and --output-len with these defaults: one length, or a range of lengths to draw from."""
    for flag, default, text in (("--input-len", inputs, "of a prompt"), ("--output-len", outputs, "to generate")):
        group.add_argument(flag, default=default, metavar="N|LOW:HIGH", help=f"tokens {text} (default: {default})")
